"""The three ops against what they replace: F.linear and torch.distributed, peers, and their own parts.

compute: the product alone on the same engine. collective: its collective alone, on the symmetric heap. engine: compute
/ F.linear. comm: fused / compute. exposed: fused - compute, us. overlap: 1 - exposed / collective. x floor: fused /
the longer of compute and collective. unfused: (the engine, then the plain collective) / fused. x torch: F.linear and
torch.distributed / fused, 20th percentiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import interlace
from interlace import functional
from interlace.reference import chunk_range

from .operands import caches_of, copies_for, packed, turning
from .output import Column, markdown, short
from .peers import Peer, product_of
from .row import Report
from .session import Session
from .shapes import Product, dtypes_of, products_of

__all__ = ["COLUMNS", "GemmCase", "cases", "readme", "run"]

SAMPLE = 32  # rows that are compared with fp64: all of them would take longer than the benchmark
ENGINE = ("fused", "unfused", "compute")  # variants that run on the tile engine
COLLECTIVE = {
    "all_gather_gemm": "all_gather",
    "gemm_all_reduce": "all_reduce",
    "gemm_reduce_scatter": "reduce_scatter",
}

COLUMNS = [
    Column("op", "op", width=19),
    Column("shape", "case", width=20),
    Column("M", "m", "{}", 5),
    Column("N", "n", "{}", 5),
    Column("K", "k", "{}", 5),
    Column("dtype", "dtype", width=8),
    Column("cache", "cache", width=5),
    Column("us", "fused_us", "{:.1f}"),
    Column("p95", "p95_us", "{:.1f}"),
    Column("TFLOP/s", "tflops", "{:.3f}", 7),
    Column("busbw", "busbw_gbps", "{:.2f}", 6),
    Column("compute", "compute_us", "{:.1f}"),
    Column("coll.", "collective_us", "{:.1f}", 8),
    Column("exposed", "exposed_us", "{:.1f}", 8),
    Column("overlap", "overlap_efficiency", "{:.2f}", 7),
    Column("engine", "engine_ratio", "{:.3f}", 6),
    Column("comm", "communication_ratio", "{:.3f}", 6),
    Column("x floor", "x_floor", "{:.3f}", 7),
    Column("unfused", "unfused_ratio", "{:.3f}", 7),
    Column("torch us", "baseline_us", "{:.1f}"),
    Column("x torch", "speedup", "{:.2f}", 7),
    Column("peer", "peer", width=9),
    Column("x peer", "peer_speedup", "{:.2f}", 6),
    Column("algorithm", "algorithm", width=14),
]


@dataclass(frozen=True)
class GemmCase:
    """A product in one dtype, with weights hot or cold."""

    product: Product
    dtype: torch.dtype
    cache: str
    world_size: int

    @property
    def name(self) -> str:
        """For the progress bar."""
        p = self.product
        return f"{p.op} {p.case} M={p.m}"

    @property
    def weight_bytes(self) -> int:
        """One weight on a rank."""
        return self.product.n * self.product.k * self.dtype.itemsize

    @property
    def memory_bytes(self) -> int:
        """Weights in turn, plain and packed, fp32 of the oracle, x and results of the variants."""
        p = self.product
        weights = (2 * copies_for(self.weight_bytes, self.cache) + 4) * self.weight_bytes
        return weights + (3 * p.m * p.k + 8 * p.m * p.n) * max(self.dtype.itemsize, 4)

    @property
    def flops(self) -> int:
        """Of one call on a rank."""
        return self.product.flops

    @property
    def moved(self) -> int:
        """Bytes of the collective, as nccl-tests counts."""
        p = self.product
        return p.m * (p.k if p.op == "all_gather_gemm" else p.n) * self.dtype.itemsize

    def identity(self) -> dict[str, Any]:
        """Fields of Row."""
        p = self.product
        dtype = str(self.dtype).removeprefix("torch.")
        return {"op": p.op, "case": p.case, "m": p.m, "n": p.n, "k": p.k, "dtype": dtype, "cache": self.cache}


@dataclass(frozen=True)
class Problem:
    """The tensors of a case. whole: x, or what is gathered from the ranks' x. weights, frozen: what takes turns."""

    op: str
    x: Tensor
    whole: Tensor
    weights: list[Tensor]
    frozen: list[Tensor]
    rows: int
    group: str


def cases(settings: Mapping[str, Any], world_size: int) -> list[GemmCase]:
    """Every product of the sets, dtype and cache."""
    return [
        GemmCase(product, dtype, cache, world_size)
        for dtype in dtypes_of(settings)
        for product in products_of(settings, world_size)
        for cache in caches_of(settings)
    ]


def problem(session: Session, case: GemmCase) -> Problem:
    """Random x and weights: what is gathered comes from one seed, what is summed from one per rank."""
    p, rank = case.product, session.rank
    gathers = p.op == "all_gather_gemm"
    seed = torch.Generator().manual_seed(0 if gathers else 1 + rank)
    whole = torch.randn(p.m, p.k, generator=seed).to(case.dtype).to(session.device)
    shard = slice(*chunk_range(p.m, session.world_size, rank))
    seed = torch.Generator().manual_seed(1000 + rank)
    first = (torch.randn(p.n, p.k, generator=seed) * 0.02).to(case.dtype).to(session.device)
    count = copies_for(case.weight_bytes, case.cache, session.device.type)
    weights = [first, *(first.clone() for _ in range(count - 1))]
    frozen = [packed(weight, session.settings) for weight in weights]
    x = whole[shard] if gathers else whole
    return Problem(p.op, x, whole, weights, frozen, p.m, session.group.name)


def fused(p: Problem, weight: Tensor) -> Tensor:
    """The op as a user calls it."""
    if p.op == "gemm_all_reduce":
        return functional.linear_all_reduce(p.x, weight, group=p.group)
    if p.op == "gemm_reduce_scatter":
        return functional.linear_reduce_scatter(p.x, weight, group=p.group)
    return functional.all_gather_linear(p.x, weight, group=p.group, gather_size=p.rows)


def collective(p: Problem, product: Tensor) -> Tensor:
    """The op's collective alone: of x before the product, of a result (here any) after it."""
    if p.op == "all_gather_gemm":
        return functional.all_gather(p.x, group=p.group, gather_size=p.rows)
    if p.op == "gemm_reduce_scatter":
        return functional.reduce_scatter(product, group=p.group)
    return functional.all_reduce(product, group=p.group)


def unfused(p: Problem, weight: Tensor) -> Tensor:
    """The same engine, and the plain collective on the heap before or after it."""
    if p.op == "all_gather_gemm":
        return functional.column_linear(collective(p, p.x), weight, group=p.group)
    return collective(p, functional.column_linear(p.x, weight, group=p.group))


def by_torch(p: Problem, weight: Tensor) -> Tensor:
    """F.linear and torch.distributed, in the dtype of x."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    if p.op == "all_gather_gemm":
        longest = -(-p.rows // world_size)  # gloo gathers equal parts only
        parts = [p.x.new_empty(longest, p.x.shape[1]) for _ in range(world_size)]
        dist.all_gather(parts, F.pad(p.x, (0, 0, 0, longest - p.x.shape[0])))
        return F.linear(torch.cat(parts)[: p.rows], weight)
    out = F.linear(p.x, weight)
    dist.all_reduce(out)
    if p.op == "gemm_all_reduce":
        return out
    begin, end = chunk_range(p.rows, world_size, rank)
    return out[begin:end]  # gloo's own reduce_scatter is slower from 4 MB on


def by_reference(p: Problem, weight: Tensor) -> Tensor:
    """The op on the reference path."""
    with interlace.backend("reference"):
        return fused(p, weight)


def expected(p: Problem, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the result to compare, and what they are in fp64."""
    rows = torch.linspace(0, p.rows - 1, min(SAMPLE, p.rows)).long()
    want = p.whole[rows].double() @ weight.double().t()
    if p.op == "all_gather_gemm":
        return rows, want
    dist.all_reduce(want)
    first, end = 0, p.rows
    if p.op == "gemm_reduce_scatter":
        first, end = chunk_range(p.rows, dist.get_world_size(), dist.get_rank())
    mine = (rows >= first) & (rows < end)
    return rows[mine] - first, want[mine]


def calls_of(p: Problem, case: GemmCase, peers: list[Peer]) -> dict[str, Callable[[Tensor], Tensor]]:
    """What is timed, as functions of a weight."""
    product = p.x.new_zeros(p.rows, case.product.n)
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "fused": lambda w: fused(p, w),
        "baseline": lambda w: by_torch(p, w),
        "unfused": lambda w: unfused(p, w),
        "reference": lambda w: by_reference(p, w),
        "compute": lambda w: functional.column_linear(p.whole, w, group=p.group),
        "linear": lambda w: F.linear(p.whole, w),
        "collective": lambda w: collective(p, product),
    }
    if p.op == "gemm_all_reduce" or p.rows % case.world_size == 0:
        for peer in peers:
            call = product_of(peer, p.op, p.x, p.weights[0], p.rows)
            if call is not None:
                calls[f"peer:{peer.name}"] = partial(call, p.x)
    return calls


def one(session: Session, case: GemmCase, peers: list[Peer]) -> None:
    """Check and time one op at one shape."""
    p = problem(session, case)
    calls = calls_of(p, case, peers)
    rows, want = expected(p, p.weights[0])
    what = f"{p.op} {case.dtype} {case.product.case} M={p.rows}"
    for name, call in calls.items():
        if name not in ("compute", "linear", "collective"):
            session.check(f"{what} {name}", call(p.weights[0])[rows], want)
    session.check(f"{what} fused, packed weight", fused(p, p.frozen[0])[rows], want)
    path = interlace.last_path()
    take = turning(list(zip(p.weights, p.frozen, strict=True)))

    def timed(name: str, call: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
        kind = 1 if name in ENGINE else 0
        return lambda: call(take()[kind])

    session.record(
        {name: timed(name, call) for name, call in calls.items()},
        flops=case.flops,
        bus=COLLECTIVE[p.op],
        bytes=case.moved,
        algorithm=path.algorithm or None,
        reason=path.reason or None,
        baseline=f"torch + {session.backend}",
        **case.identity(),
    )


def run(settings: Mapping[str, object]) -> int:
    """On every rank."""
    session = Session("gemm", COLUMNS, settings)
    peers = session.peers()
    return session.run(cases(settings, session.world_size), lambda case: one(session, case, peers))


README = (
    Column("op", "op"),
    Column("dtype", "dtype"),
    Column("M", "m", "{:,}"),
    Column("N", "n", "{:,}"),
    Column("K", "k", "{:,}"),
    Column("us", "fused_us", "{:.0f}"),
    Column("engine", "engine_ratio", "{:.2f}"),
    Column("communication", "communication_ratio", "{:.3f}"),
    Column("overlap", "overlap_efficiency", "{:.2f}"),
    Column("x floor", "x_floor", "{:.3f}"),
    Column("unfused / fused", "unfused_ratio", "{:.2f}"),
    Column("x torch", "speedup", "{:.1f}"),
    Column("x peer", "peer_speedup", "{:.1f}"),
    Column("peer", "peer"),
)


def readme(report: Report) -> str:
    """A line per shape."""
    rows = [replace(r, op=f"`{r.op}`", dtype=short(r.dtype)) for r in report.rows if not r.straggler_us]
    return markdown(rows, README, notes=False)
