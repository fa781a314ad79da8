"""Plain collectives on the symmetric heap, by torch.distributed, and by the peers that are installed.

Columns as nccl-tests prints them, out of place: size is the bytes of the result of all_reduce and all_gather and of
the input of reduce_scatter and all_to_all, algbw = size / time, busbw = algbw x the bus factor, #wrong counts values.
floor: a plain copy of the result, the least any of them does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import interlace
from interlace import functional

from .operands import caches_of, copies_for, turning
from .output import Column, table
from .peers import Peer
from .row import Report, Row
from .session import Session, size_of
from .shapes import dtypes_of

__all__ = ["COLUMNS", "Collective", "cases", "readme", "run"]

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
KIBI = 1024
SIZES = {
    "full": tuple(4 * KIBI << 2 * i for i in range(8)),  # to 64 MiB
    "small": tuple(4 * KIBI << 4 * i for i in range(4)),
    "quick": (4 * KIBI, 1024 * KIBI),
}

COLUMNS = [
    Column("op", "op", width=14),
    Column("size(B)", "bytes", "{:,}", 11),
    Column("count", "count", "{:,}", 11),
    Column("type", "dtype"),
    Column("redop", "redop", width=5),
    Column("cache", "cache", width=5),
    Column("time(us)", "fused_us", "{:.1f}"),
    Column("p95", "p95_us", "{:.1f}", 8),
    Column("algbw", "algbw_gbps", "{:.2f}", 7),
    Column("busbw", "busbw_gbps", "{:.2f}", 7),
    Column("#wrong", "wrong", "{}", 6),
    Column("torch us", "baseline_us", "{:.1f}"),
    Column("x torch", "speedup", "{:.2f}", 7),
    Column("peer", "peer", width=9),
    Column("peer us", "peer_us", "{:.1f}"),
    Column("x peer", "peer_speedup", "{:.2f}", 6),
    Column("x floor", "x_floor", "{:.2f}", 7),
    Column("algorithm", "algorithm", width=10),
]


@dataclass(frozen=True)
class Collective:
    """One collective of `count` values on a rank's larger side."""

    op: str
    count: int
    dtype: torch.dtype
    cache: str

    @property
    def name(self) -> str:
        """For the progress bar."""
        return f"{self.op} {self.bytes:,} bytes"

    @property
    def bytes(self) -> int:
        """As nccl-tests counts."""
        return self.count * self.dtype.itemsize

    @property
    def memory_bytes(self) -> int:
        """Inputs in turn, results of all variants, staging on the heap."""
        return self.bytes * (copies_for(self.bytes, self.cache) + 12)

    flops = 0

    def identity(self) -> dict[str, Any]:
        """Fields of Row."""
        dtype = str(self.dtype).removeprefix("torch.")
        return {"op": self.op, "bytes": self.bytes, "dtype": dtype, "cache": self.cache}


def cases(settings: Mapping[str, Any], world_size: int) -> list[Collective]:
    """Every op, dtype and size; sizes are rounded down to whole values per rank. ValueError for a bad --bytes."""
    return [
        Collective(op, size // dtype.itemsize // world_size * world_size, dtype, cache)
        for op in OPS
        for dtype in dtypes_of(settings)
        for size in sizes_of(settings)
        for cache in caches_of(settings)
    ]


def sizes_of(settings: Mapping[str, Any]) -> tuple[int, ...]:
    """Bytes: --bytes or the list of this --size."""
    given = settings.get("bytes")
    if not given:
        return SIZES[size_of(settings)]
    try:
        sizes = tuple(int(text) for text in str(given).split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 64:
        raise ValueError(f"bench collective: --bytes {given}; expected numbers from 64 on, like 4096,1048576")
    return sizes


def ours(op: str, x: Tensor, group: str) -> Tensor:
    """The collective of interlace.functional."""
    if op == "all_reduce":
        return functional.all_reduce(x, group=group)
    if op == "reduce_scatter":
        return functional.reduce_scatter(x, group=group)
    if op == "all_to_all":
        return functional.all_to_all(x, group=group)
    return functional.all_gather(x, group=group)


def by_torch(op: str, x: Tensor, out: Tensor, scratch: Tensor) -> Tensor:
    """The same by torch.distributed, into buffers that exist. It adds in place, so x is copied first."""
    if op == "all_gather":
        dist.all_gather(list(out.chunk(dist.get_world_size())), x)
        return out
    if op == "all_to_all":
        dist.all_to_all_single(out, x)
        return out
    if op == "reduce_scatter" and x.is_cuda:
        dist.reduce_scatter_tensor(out, x)
        return out
    scratch.copy_(x)
    dist.all_reduce(scratch)
    if op == "all_reduce":
        return scratch
    # faster than gloo's reduce_scatter from 4 MB on
    return scratch.chunk(dist.get_world_size())[dist.get_rank()]


def tensors_for(case: Collective, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """This rank's x and the expected result: small integers, whose sums are exact."""
    generator = torch.Generator().manual_seed(7)
    every = torch.randint(-8, 9, (world_size, case.count), generator=generator)
    parts = [row.chunk(world_size) for row in every]
    if case.op == "all_gather":
        x, want = parts[0][rank], every[0]
    elif case.op == "all_to_all":
        x, want = every[rank], torch.cat([parts[r][rank] for r in range(world_size)])
    else:
        total = every.sum(0)
        x, want = every[rank], total if case.op == "all_reduce" else total.chunk(world_size)[rank]
    return x.to(case.dtype), want.to(case.dtype)


def variants_of(
    session: Session, case: Collective, want: Tensor, x: Tensor, peers: list[Peer]
) -> dict[str, Callable[[Tensor], Tensor]]:
    """What is timed, as functions of an input."""
    out, scratch, copy = torch.empty_like(want), torch.empty_like(x), torch.empty_like(want)
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "fused": lambda x: ours(case.op, x, session.group.name),
        "baseline": lambda x: by_torch(case.op, x, out, scratch),
        "floor": lambda x: copy.copy_(want),
    }
    for peer in peers:
        call = peer.collective(case.op, x, torch.empty_like(want)) if peer.collective else None
        if call is not None:
            calls[f"peer:{peer.name}"] = call
    return calls


def one(session: Session, case: Collective, peers: list[Peer]) -> None:
    """Check and time one collective of one size."""
    x, want = (t.to(session.device) for t in tensors_for(case, session.rank, session.world_size))
    calls = variants_of(session, case, want, x, peers)
    for name, call in calls.items():
        if name != "floor":
            session.check(f"{case.op} {case.dtype} {case.bytes} bytes {name}", call(x), want)
    ours(case.op, x, session.group.name)
    path = interlace.last_path()
    take = turning(
        [x, *(x.clone() for _ in range(copies_for(case.bytes, case.cache, session.device.type) - 1))]
    )
    session.record(
        {name: partial(_taking, call, take) for name, call in calls.items()},
        bus=case.op,
        budget=0.7,
        algorithm=path.algorithm or None,
        reason=path.reason or None,
        baseline=f"torch + {session.backend}",
        extra={
            "count": case.count,
            "redop": "sum" if case.op in ("all_reduce", "reduce_scatter") else "none",
        },
        **case.identity(),
    )


def _taking(call: Callable[[Tensor], Tensor], take: Callable[[], Tensor]) -> Tensor:
    return call(take())


def run(settings: Mapping[str, object]) -> int:
    """On every rank."""
    session = Session("collective", COLUMNS, settings)
    peers = session.peers()
    return session.run(cases(settings, session.world_size), lambda case: one(session, case, peers))


def readme(report: Report) -> str:
    """fp32: a line per size, for every op its time, how much faster than torch, and than the best peer."""
    found = {
        (row.op, row.bytes): row for row in report.rows if row.dtype == "float32" and not row.straggler_us
    }
    sizes = sorted({size for _, size in found if size})
    head = ["bytes", *(title for op in OPS for title in (f"{op} us", "x torch", "x peer"))]
    lines = []
    for size in sizes:
        cells = [f"{size:,}"]
        for op in OPS:
            row = found.get((op, size))
            cells += _figures(row) if row is not None else ["-"] * 3
        lines.append(cells)
    return table(head, lines, left=0)


def _figures(row: Row) -> list[str]:
    peer = f"{row.peer_speedup:.2f} {row.peer}" if row.peer_speedup else "-"
    values = (
        "-" if row.fused_us is None else f"{row.fused_us:.0f}",
        "-" if row.speedup is None else f"{row.speedup:.1f}",
    )
    return [*values, peer]
