"""How fast: the GEMM against torch.mm, what flags and schedule cost, fused ops by virtual ranks, the reducer, small
messages. Rows of plain numbers; who reads them judges.

Virtual ranks share one GPU and its memory: their times say what the kernels cost, not what links would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from interlace.device import Workspace
from tests.device.gpu import launches
from tests.device.gpu.clock import compare, replayed
from tests.device.gpu.launches import OPS, Behind, Group

Row = dict[str, Any]
DTYPE = torch.bfloat16
# (N, K) of the unsplit projections
LLAMA = {
    "8B qkv": (6144, 4096),
    "8B o": (4096, 4096),
    "8B gate_up": (28672, 4096),
    "8B down": (4096, 14336),
    "70B qkv": (10240, 8192),
    "70B o": (8192, 8192),
    "70B gate_up": (57344, 8192),
    "70B down": (8192, 28672),
}
ROWS = (1, 16, 64, 256, 1024, 2048, 4096, 8192, 16384)
WORLDS = (2, 4, 8)
REPEATS = 20


def normal(*shape: int) -> Tensor:
    """Random numbers: zeros would let the chip run faster."""
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(DTYPE)


def gemm() -> Iterator[Row]:
    """The plain kernel with both tiles against torch.mm."""
    for name, (n, k) in LLAMA.items():
        weight = normal(n, k)
        for m in ROWS:
            yield _gemm_row(name, weight, normal(m, k))


def _gemm_row(name: str, weight: Tensor, x: Tensor) -> Row:
    (n, k), m = weight.shape, x.shape[0]
    out = torch.empty(m, n, dtype=DTYPE, device="cuda")

    def ours(tile: int) -> Callable[[], None]:
        return lambda: OPS._device_gemm([x], [weight], [None], None, None, [], [out], False, tile, 0)

    library = {"torch.mm": lambda: torch.mm(x, weight.t(), out=out)}
    times = compare({**library, "tile 128": ours(128), "tile 256": ours(256)}, seconds=0.08)
    best = min(times["tile 128"].median, times["tile 256"].median)
    return {
        "op": "gemm",
        "shape": name,
        "m": m,
        "n": n,
        "k": k,
        "us": {variant: round(t.median, 1) for variant, t in times.items()},
        "p95_us": {variant: round(t.p95, 1) for variant, t in times.items()},
        "tflops": {variant: round(t.tflops(2.0 * m * n * k), 1) for variant, t in times.items()},
        "of_torch_mm": round(times["torch.mm"].median / best, 3),
    }


def overhead() -> Iterator[Row]:
    """World size 1: what polling flags and the schedule of shards cost over the plain kernel."""
    for name in ("8B gate_up", "70B o"):
        for m in (1024, 4096, 8192):
            yield _overhead_row(name, m)


def _overhead_row(name: str, m: int) -> Row:
    n, k = LLAMA[name]
    x, weight, out = normal(m, k), normal(n, k), torch.empty(m, n, dtype=DTYPE, device="cuda")
    group = Group(1, OPS._device_half_bytes_all_gather_gemm([m], k, 2), "cuda")
    tail = group.ranks.workspace.tail
    blocks = OPS._device_multiprocessors(0) - 1  # the fused kernel keeps one for moving rows

    def plain() -> None:
        OPS._device_gemm([x], [weight], [None], None, None, [], [out], False, 256, blocks)

    def flags() -> None:
        OPS._device_all_gather_gemm(x, [weight], [None], None, [], None, [out], [m], *tail, 256, 0, 1)

    times = compare({"plain": plain, "flags": flags}, seconds=0.2)
    group.synchronize()
    return {
        "op": "all_gather_gemm, world size 1",
        "shape": name,
        "m": m,
        "n": n,
        "k": k,
        "us": {variant: round(t.median, 1) for variant, t in times.items()},
        "slowdown": round(times["flags"].median / times["plain"].median - 1, 4),
    }


def fused() -> Iterator[Row]:
    """Fused ops by virtual ranks against the same work in steps and all at once by torch on the same GPU."""
    for world_size in WORLDS:
        for m in (256, 2048, 8192):
            n, k = 8192, 8192
            yield _gather_row(world_size, m, n // world_size, k)
            yield _reduce_row(world_size, m, n, k // world_size, scatter=True)
            yield _reduce_row(world_size, m, n, k // world_size, scatter=False)


def _row(op: str, world_size: int, m: int, n: int, k: int, times: dict[str, Any]) -> Row:
    flops = 2.0 * m * n * k * world_size
    return {
        "op": op,
        "world_size": world_size,
        "m": m,
        "n": n,
        "k": k,
        "us": {variant: round(t.median, 1) for variant, t in times.items()},
        "tflops": {variant: round(t.tflops(flops), 1) for variant, t in times.items()},
    }


def _gather_row(world_size: int, m: int, n: int, k: int) -> Row:
    rows = [m // world_size] * world_size
    group = Group(world_size, OPS._device_half_bytes_all_gather_gemm(rows, k, 2), "cuda")
    xs = [normal(rows[0], k) for _ in rows]
    weights = [normal(n, k) for _ in rows]
    outs = [torch.empty(m, n, dtype=DTYPE, device="cuda") for _ in rows]
    whole = [torch.empty(m, k, dtype=DTYPE, device="cuda") for _ in rows]

    def ours(comm_blocks: int) -> Callable[[], None]:
        def launch(w: Workspace) -> None:
            r = w.rank
            OPS._device_all_gather_gemm(
                xs[r], [weights[r]], [None], None, [], None, [outs[r]], rows, *w.tail, 128, 0, comm_blocks
            )

        return lambda: group.each(launch)

    def baseline() -> None:
        for r in range(world_size):
            torch.cat(xs, out=whole[r])
            torch.mm(whole[r], weights[r].t(), out=outs[r])

    def decomposed() -> None:
        step = rows[0]
        for r in range(world_size):
            for source in range(world_size):
                part = slice(source * step, (source + 1) * step)
                whole[r][part].copy_(xs[source])
                torch.mm(whole[r][part], weights[r].t(), out=outs[r][part])

    variants = {"fused": ours(2), "copy engine": ours(0), "decomposed": decomposed, "baseline": baseline}
    times = compare(variants, seconds=0.15)
    group.synchronize()
    return _row("all_gather_gemm", world_size, m, n, k, times)


def _reduce_row(world_size: int, m: int, n: int, k: int, *, scatter: bool) -> Row:
    rows = [m // world_size] * world_size
    half = OPS._device_half_bytes_gemm_reduce(
        rows if scatter else [m], world_size, scatter, n, 2, False, False
    )
    group = Group(world_size, half, "cuda")
    xs = [normal(m, k) for _ in rows]
    weights = [normal(n, k) for _ in rows]
    partials = [torch.empty(m, n, dtype=DTYPE, device="cuda") for _ in rows]
    outs = [torch.empty(rows[0] if scatter else m, n, dtype=DTYPE, device="cuda") for _ in rows]
    op = OPS._device_gemm_reduce_scatter if scatter else OPS._device_gemm_all_reduce

    def launch(w: Workspace) -> None:
        r = w.rank
        behind = (None, None, None, 0.0, None, [], outs[r], None)
        op([xs[r]], [weights[r]], *behind, *([rows] if scatter else []), False, False, *w.tail, 128, 0, 0)

    def baseline() -> None:
        for r in range(world_size):
            torch.mm(xs[r], weights[r].t(), out=partials[r])
        for r in range(world_size):
            part = slice(r * rows[0], (r + 1) * rows[0]) if scatter else slice(None)
            torch.sum(torch.stack([p[part] for p in partials]), 0, out=outs[r])

    times = compare({"fused": lambda: group.each(launch), "baseline": baseline}, seconds=0.15)
    group.synchronize()
    name = "gemm_reduce_scatter" if scatter else "gemm_all_reduce"
    return _row(name, world_size, m, n, k, times)


def reducer() -> Iterator[Row]:
    """The sum in rank order, almost without products (K = 64), against a copy of as many bytes."""
    for world_size in WORLDS:
        yield _reducer_row(world_size)


def _reducer_row(world_size: int) -> Row:
    m, n, k = 8192, 8192, 64
    rows = [m // world_size] * world_size
    half = OPS._device_half_bytes_gemm_reduce(rows, world_size, True, n, 2, False, False)
    group = Group(world_size, half, "cuda")
    xs, weights = [normal(m, k) for _ in rows], [normal(n, k) for _ in rows]
    outs = [torch.empty(rows[0], n, dtype=DTYPE, device="cuda") for _ in rows]
    # slots are written once and read once, sums written once
    nbytes = 2.0 * m * n * (2 * world_size + 1)
    source = torch.empty(int(nbytes) // 4, dtype=torch.int16, device="cuda")  # a copy reads and writes
    target = torch.empty_like(source)

    def launch(w: Workspace) -> None:
        r = w.rank
        behind = (None, None, None, 0.0, None, [], outs[r], None)
        OPS._device_gemm_reduce_scatter(
            [xs[r]], [weights[r]], *behind, rows, False, False, *w.tail, 128, 0, 0
        )

    times = compare({"reduce": lambda: group.each(launch), "copy": lambda: target.copy_(source)}, seconds=0.2)
    group.synchronize()
    return {
        "op": "sum in rank order",
        "world_size": world_size,
        "m": m,
        "n": n,
        "k": k,
        "us": {variant: round(t.median, 1) for variant, t in times.items()},
        "gb_per_s": {variant: round(t.gigabytes(nbytes), 0) for variant, t in times.items()},
        "of_copy": round(times["copy"].median / times["reduce"].median, 3),
    }


def small() -> Iterator[Row]:
    """All-reduce of few tokens, with residual and RMSNorm, in a replayed graph: microseconds on the device."""
    for world_size in WORLDS:
        for m in (1, 16, 128):
            yield _small_row(world_size, m, 8192)


def _small_row(world_size: int, m: int, n: int) -> Row:
    one, two = OPS._device_half_bytes_one_shot(m, n, 2), OPS._device_half_bytes_two_shot(m, n, 2, world_size)
    group = Group(world_size, max(one, two), "cuda")
    xs = [normal(m, n) for _ in range(world_size)]
    behind = Behind(None, [normal(m, n)] * world_size, normal(n), norm=True)
    blocks = min(64, OPS._device_multiprocessors(0) // world_size)
    variants = {
        algorithm: replayed(
            partial(launches.reduce_norm, group, xs, None, behind, algorithm, blocks), REPEATS
        )
        for algorithm in ("one_shot", "two_shot")
    }
    times = compare(variants, seconds=0.05, cold=False)
    group.synchronize()
    return {
        "op": "all_reduce + residual + RMSNorm",
        "world_size": world_size,
        "m": m,
        "n": n,
        "us": {variant: round(t.median / REPEATS, 2) for variant, t in times.items()},
    }


PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    "gemm": gemm,
    "overhead": overhead,
    "fused": fused,
    "reducer": reducer,
    "small": small,
}
