"""The three ops against what they replace: F.linear, F.linear and gloo, the reference path, their own engine.

engine: compute only / F.linear, what the tile engine gains by itself. comm: fused / compute only, what the
communication still costs. unfused: (same engine, then the plain collective) / fused. x gloo: gloo at its best
(20th percentile, ranks spinning until they enter) / fused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import interlace
from interlace import functional
from interlace.bench.harness import Column, Session, command, copies_for, packed, rotating
from interlace.reference import chunk_range

# (rows of x, depth on this rank, columns of the weight on this rank) of a two-way split of hidden 1024 and
# 4096
SHAPES = {
    "gemm_all_reduce": [
        (1, 512, 1024),
        (16, 512, 1024),
        (64, 512, 1024),
        (128, 512, 1024),
        (512, 512, 1024),
        (2048, 512, 1024),
        (2048, 1408, 1024),
        (1, 2048, 4096),
        (16, 2048, 4096),
        (512, 2048, 4096),
    ],
    "gemm_reduce_scatter": [(128, 512, 1024), (512, 512, 1024), (2048, 512, 1024), (512, 2048, 4096)],
    "all_gather_gemm": [(512, 1024, 512), (2048, 1024, 512), (512, 1024, 1408), (512, 4096, 2048)],
}
QUICK = 3  # shapes per op with --quick
SAMPLE = 32  # rows that are compared with fp64: all of them would take longer than the benchmark

COLUMNS = [
    Column("op", "op", width=20),
    Column("dtype", "dtype"),
    Column("M,K,N", "shape", width=14),
    Column("us", "us", "{:.1f}"),
    Column("p95", "p95_us", "{:.1f}"),
    Column("TFLOP/s", "tflops", "{:.3f}"),
    Column("F.linear", "linear_us", "{:.1f}"),
    Column("engine", "engine", "{:.3f}"),
    Column("comm", "communication", "{:.3f}"),
    Column("exposed us", "exposed_us", "{:.1f}", 11),
    Column("unfused", "unfused", "{:.3f}"),
    Column("reference", "reference", "{:.2f}"),
    Column("x gloo", "gloo", "{:.2f}"),
    Column("algorithm", "algorithm", width=16),
]


ENGINE = ("fused", "unfused", "compute")  # variants that run on the tile engine


@dataclass(frozen=True)
class Problem:
    """One op at one shape on this rank. `whole`: x, or what is gathered from the ranks' x; it has `rows` rows.

    weights, frozen: what the variants rotate through, plain and as the engine has them.
    """

    op: str
    x: Tensor
    whole: Tensor
    weights: list[Tensor]
    frozen: list[Tensor]
    rows: int
    group: str


def fused(p: Problem, weight: Tensor) -> Tensor:
    """The op as a user calls it."""
    if p.op == "gemm_all_reduce":
        return functional.linear_all_reduce(p.x, weight, group=p.group)
    if p.op == "gemm_reduce_scatter":
        return functional.linear_reduce_scatter(p.x, weight, group=p.group)
    return functional.all_gather_linear(p.x, weight, group=p.group, gather_size=p.rows)


def unfused(p: Problem, weight: Tensor) -> Tensor:
    """The same engine, and the plain collective on the heap before or after it."""
    if p.op == "all_gather_gemm":
        x = functional.all_gather(p.x, group=p.group, gather_size=p.rows)
        return functional.column_linear(x, weight, group=p.group)
    out = functional.column_linear(p.x, weight, group=p.group)
    if p.op == "gemm_reduce_scatter":
        return functional.reduce_scatter(out, group=p.group)
    return functional.all_reduce(out, group=p.group)


def gloo(p: Problem, weight: Tensor) -> Tensor:
    """F.linear and torch.distributed, in the dtype of x."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    if p.op == "all_gather_gemm":
        longest = -(-p.rows // world_size)  # gloo gathers equal parts only
        parts = [torch.empty(longest, p.x.shape[1], dtype=p.x.dtype) for _ in range(world_size)]
        dist.all_gather(parts, F.pad(p.x, (0, 0, 0, longest - p.x.shape[0])))
        return F.linear(torch.cat(parts)[: p.rows], weight)
    out = F.linear(p.x, weight)
    dist.all_reduce(out)
    if p.op == "gemm_all_reduce":
        return out
    begin, end = chunk_range(p.rows, world_size, rank)
    return out[begin:end]  # gloo's own reduce_scatter is slower from 4 MB on


def with_reference(p: Problem, weight: Tensor) -> Tensor:
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


def problem(op: str, shape: tuple[int, int, int], dtype: torch.dtype, session: Session) -> Problem:
    """Random x and weights: what is gathered comes from one seed, what is summed from one per rank."""
    rows, depth, columns = shape
    gathers = op == "all_gather_gemm"
    whole = torch.randn(
        rows, depth, generator=torch.Generator().manual_seed(0 if gathers else 1 + session.rank)
    )
    whole = whole.to(dtype)
    shard = slice(*chunk_range(rows, session.world_size, session.rank))
    generator = torch.Generator().manual_seed(1000 + session.rank)
    count = copies_for(rows, depth * columns * dtype.itemsize)
    first = (torch.randn(columns, depth, generator=generator) * 0.02).to(dtype)
    weights = [first, *(first.clone() for _ in range(count - 1))]
    frozen = [packed(weight, session.settings) for weight in weights]
    return Problem(op, whole[shard] if gathers else whole, whole, weights, frozen, rows, session.group.name)


def calls(p: Problem) -> dict[str, Callable[[], Tensor]]:
    """The variants, each going through the weights in turn."""
    variants: dict[str, Callable[[Tensor], Tensor]] = {
        "linear": lambda w: F.linear(p.whole, w),
        "gloo": lambda w: gloo(p, w),
        "reference": lambda w: with_reference(p, w),
        "fused": lambda w: fused(p, w),
        "unfused": lambda w: unfused(p, w),
        "compute": lambda w: functional.column_linear(p.whole, w, group=p.group),
    }

    # one turn for all variants: the weight that one has just read must not be the next one's
    take_frozen, take_plain = rotating(p.frozen), rotating(p.weights)

    def turning(name: str, call: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
        take = take_frozen if name in ENGINE else take_plain
        return lambda: call(take())

    return {name: turning(name, call) for name, call in variants.items()}


def one(session: Session, op: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Check and time one op at one shape."""
    p = problem(op, shape, dtype, session)
    variants = calls(p)
    rows, want = expected(p, p.weights[0])
    what = f"{op} {dtype} M,K,N={shape}"
    for name in ("fused", "unfused", "gloo", "reference"):
        got = variants[name]()
        session.check(f"{what} {name}", got[rows], want)
    variants["fused"]()
    algorithm = interlace.last_path().algorithm
    timings = session.time(variants)
    mine, best_gloo = timings.summary("fused"), timings.summary("gloo").p20
    session.add(
        op=op,
        dtype=str(dtype).removeprefix("torch."),
        shape=",".join(map(str, shape)),
        us=mine.median * 1e6,
        p95_us=mine.p95 * 1e6,
        tflops=2 * shape[0] * shape[1] * shape[2] / mine.median / 1e12,
        linear_us=timings.summary("linear").median * 1e6,
        engine=timings.ratio("compute", "linear"),
        communication=timings.ratio("fused", "compute"),
        exposed_us=timings.difference("fused", "compute") * 1e6,
        unfused=timings.ratio("unfused", "fused"),
        reference=timings.ratio("reference", "fused"),
        gloo=best_gloo / mine.median,
        gloo_us=timings.summary("gloo").median * 1e6,
        gloo_p20_us=best_gloo * 1e6,
        algorithm=algorithm,
        kept=mine.kept,
        taken=mine.taken,
    )


def run(settings: Mapping[str, object]) -> int:
    """On every rank."""
    session = Session("gemm_collectives", COLUMNS, settings)
    for dtype in session.dtypes:
        for op, shapes in SHAPES.items():
            for shape in shapes[:QUICK] if session.quick else shapes:
                one(session, op, shape, dtype)
    return session.finish()


if __name__ == "__main__":
    command(__file__, run, __doc__)()
