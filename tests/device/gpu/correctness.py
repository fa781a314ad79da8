"""All ops x dtypes x odd shapes x worlds against fp64, by virtual ranks.

Options (layout, number of weights, tile, wire, who moves the rows, mainloop) change from case to case instead of being
multiplied out: each value of one meets each value of another within a world.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.device.gpu import launches
from tests.device.gpu.launches import Behind, Group, Options
from tests.device.gpu.problems import (
    FP8,
    Scope,
    Source,
    exact_product,
    rms_norm,
    rounded,
    total,
)
from tests.oracle import check_close, check_equal, error

DTYPES = (torch.bfloat16, torch.float16)
SUMMED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = 1e-5
NORM_ERROR = 8 * torch.finfo(torch.float32).eps  # of the sum of squares, the root and two products in fp32


@dataclass(frozen=True)
class Case:
    """One call of one op; `run` raises AssertionError when it is wrong."""

    name: str
    run: Callable[[], None]


def options_of(turn: int, dtype: torch.dtype, *, gather: bool) -> Options:
    """Launch options of case number `turn`."""
    wide = turn % 3 == 0 and dtype == torch.bfloat16
    return Options(
        tile_columns=256 if wide else 128,
        comm_blocks=(2, 0, 4)[turn % 3] if gather else (0, 2)[turn % 2],
        mainloop=80 if turn % 4 == 3 and dtype != FP8 else 0,
        float32_wire=turn % 2 == 1,
    )


def gemm_cases(scope: Scope) -> Iterator[Case]:
    """The plain product."""
    for dtype in (*DTYPES, FP8):
        for turn, (n, k) in enumerate(scope.shapes):
            if dtype == FP8 and k % 16:
                continue  # rows of float8 that TMA cannot read are refused
            for rows in scope.rows:
                yield Case(
                    f"gemm {dtype} [{rows}, {k}] x [{n}, {k}]",
                    lambda d=dtype, t=turn, r=rows, n=n, k=k: check_gemm(scope.device, d, t, r, n, k),
                )


def check_gemm(device: str, dtype: torch.dtype, turn: int, rows: int, n: int, k: int) -> None:
    """Exact integers: bias, residual, two summed products, scales of float8."""
    source = Source(device, turn)
    fp8, out = dtype == FP8, torch.bfloat16 if dtype == FP8 else dtype
    mn_major, summed = turn % 2 == 1 and not fp8, turn % 3 == 2 and not fp8
    count = 2 if summed else 1 + turn % 3
    xs = [source.integers(rows, k, dtype=dtype) for _ in range(count if summed else 1)]
    weights = [source.weight(n, k, dtype=dtype, mn_major=mn_major, exact=True) for _ in range(count)]
    outs = 1 if summed else count
    biases = [source.integers(n, dtype=out, bound=4) if turn % 2 else None for _ in range(outs)]
    residual = source.integers(rows, n, dtype=out, bound=4) if summed else None
    row_wise = fp8 and turn % 2 == 1
    x_scale = source.scale(rows if row_wise else 1) if fp8 else None
    scales = [source.scale(n if row_wise else 1) for _ in range(count)] if fp8 else []
    options = options_of(turn, dtype, gather=True)
    got = launches.gemm(
        xs, weights, biases, options, summed=summed, residual=residual, x_scale=x_scale, weight_scales=scales
    )
    products = [exact_product(xs[p if summed else 0], weights[p]) for p in range(count)]
    for p, scale in enumerate(scales):
        assert x_scale is not None
        products[p] = products[p] * x_scale.double()[:, None] * scale.double()[None, :]
    expected = [total(products)] if summed else products
    for out_index, value in enumerate(expected):
        bias = biases[out_index]
        value = value if bias is None else value + bias.double()
        value = value if residual is None else value + residual.double()
        check_equal(f"out {out_index}", got[out_index], rounded(value, out))


def fused_cases(scope: Scope) -> Iterator[Case]:
    """all_gather_gemm, gemm_reduce_scatter, gemm_all_reduce."""
    for world_size in scope.worlds:
        group = Group(world_size, 0, scope.device)
        for dtype in (*DTYPES, FP8):
            for turn, (n, k) in enumerate(scope.shapes):
                if dtype == FP8 and k % 16:
                    continue
                for name, check in (
                    ("all_gather_gemm", check_gather),
                    ("gemm_reduce_scatter", check_scatter),
                    ("gemm_all_reduce", check_everywhere),
                ):
                    yield Case(
                        f"{name} {dtype} W={world_size} N={n} K={k}",
                        lambda c=check, g=group, d=dtype, t=turn, n=n, k=k: c(scope, g, d, t, n, k),
                    )


def check_gather(scope: Scope, group: Group, dtype: torch.dtype, turn: int, n: int, k: int) -> None:
    """Uneven and empty shards, one to three weights; twice, so that both halves are used."""
    source, fp8 = Source(scope.device, turn), dtype == FP8
    rows = scope.rows_of(group.world_size, turn)
    count, mn_major, out = 1 + turn % 3, turn % 2 == 1 and not fp8, torch.bfloat16 if fp8 else dtype
    options = options_of(turn, dtype, gather=True)
    for _ in range(2):
        xs = [source.integers(r, k, dtype=dtype) for r in rows]
        weights = [
            [source.weight(n, k, dtype=dtype, mn_major=mn_major, exact=True) for _ in range(count)]
            for _ in rows
        ]
        biases = [[source.integers(n, dtype=out, bound=4) if turn % 2 else None] * count for _ in rows]
        x_scales = [source.scale(r) for r in rows] if fp8 else None
        scales = [[source.scale(n) for _ in range(count)] for _ in rows] if fp8 else None
        wholes, outs = launches.all_gather_gemm(
            group,
            xs,
            weights,
            biases,
            options,
            x_scales=x_scales,
            weight_scales=scales,
            gathered=turn % 2 == 0,
        )
        group.synchronize()
        whole = torch.cat([x.double() for x in xs])
        for rank in range(group.world_size):
            gathered = wholes[rank]
            if gathered is not None:
                check_equal(f"gathered of rank {rank}", gathered.double(), whole)
            for p in range(count):
                value = whole @ weights[rank][p].double().t()
                if x_scales is not None and scales is not None:
                    value = value * torch.cat(x_scales).double()[:, None] * scales[rank][p].double()[None, :]
                bias = biases[rank][p]
                value = value if bias is None else value + bias.double()
                check_equal(f"out {p} of rank {rank}", outs[rank][p], rounded(value, out))


def behind_of(
    source: Source, turn: int, rows: list[int], n: int, dtype: torch.dtype, *, equal: bool
) -> Behind:
    """Bias, residual and norm of case number `turn`. equal: every rank has the same residual."""
    residuals: list[Tensor | None] | None = None
    if turn % 3 != 0:
        first = source.integers(rows[0], n, dtype=dtype, bound=4)
        residuals = [first if equal else source.integers(r, n, dtype=dtype, bound=4) for r in rows]
    norm = turn % 2 == 1
    return Behind(
        bias=source.integers(n, dtype=dtype, bound=4) if turn % 4 else None,
        residuals=residuals,
        norm_weight=source.normal(n, dtype=dtype) if norm and turn % 4 == 1 else None,
        eps=EPS,
        norm=norm,
    )


def check_behind(
    what: str,
    behind: Behind,
    rank: int,
    sums: Tensor,
    normalised: Tensor | None,
    exact: Tensor,
    dtype: torch.dtype,
) -> None:
    """Sums are exact; the norm, of the rounded sums, is as good as fp32 arithmetic and one rounding make it."""
    value = exact if behind.bias is None else exact + behind.bias.double()
    residual = None if behind.residuals is None else behind.residuals[rank]
    value = value if residual is None else value + residual.double()
    expected = rounded(value, dtype)
    check_equal(f"{what} of rank {rank}", sums, expected)
    if normalised is None:
        return
    best = rms_norm(expected, behind.norm_weight, behind.eps)
    found, rounding = error(normalised, best), error(best.to(dtype), best)
    allowed = 1.5 * rounding.relative + NORM_ERROR
    assert found.relative <= allowed, f"norm of rank {rank}: error {found}, allowed {allowed:.3e}"


def check_scatter(scope: Scope, group: Group, dtype: torch.dtype, turn: int, n: int, k: int) -> None:
    """Owners of any number of rows; twice, so that both halves are used."""
    rows = scope.rows_of(group.world_size, turn)
    _check_reduce(scope, group, dtype, turn, (n, k), rows, sum(rows))


def check_everywhere(scope: Scope, group: Group, dtype: torch.dtype, turn: int, n: int, k: int) -> None:
    """All rows at all ranks, and the same bits there."""
    rows = max(1, scope.rows[turn % len(scope.rows)])
    _check_reduce(scope, group, dtype, turn, (n, k), None, rows)


def _check_reduce(
    scope: Scope,
    group: Group,
    dtype: torch.dtype,
    turn: int,
    shape: tuple[int, int],
    rows: list[int] | None,
    count: int,
) -> None:
    n, k = shape
    source, fp8 = Source(scope.device, turn), dtype == FP8
    out, products = torch.bfloat16 if fp8 else dtype, 1 if fp8 else 1 + turn % 2
    mn_major = turn % 2 == 0 and not fp8
    options = options_of(turn, dtype, gather=False)
    own = [count] * group.world_size if rows is None else rows
    for _ in range(2):
        ranks = range(group.world_size)
        xs = [[source.integers(count, k, dtype=dtype) for _ in range(products)] for _ in ranks]
        weights = [
            [source.weight(n, k, dtype=dtype, mn_major=mn_major, exact=True) for _ in range(products)]
            for _ in ranks
        ]
        behind = behind_of(source, turn, own, n, out, equal=rows is None)
        scales = [source.scale(1) for _ in range(2)] if fp8 else None
        sums, normalised = launches.gemm_reduce(
            group,
            xs,
            weights,
            rows,
            behind,
            options,
            x_scales=None if scales is None else [scales[0]] * group.world_size,
            weight_scales=None if scales is None else [[scales[1]]] * group.world_size,
        )
        group.synchronize()
        parts = [total([exact_product(x, w) for x, w in zip(xs[r], weights[r], strict=True)]) for r in ranks]
        exact = total(parts) if scales is None else total(parts) * (scales[0] * scales[1]).double()
        begins = [sum(own[:r]) if rows is not None else 0 for r in ranks]
        for rank in ranks:
            mine = exact[begins[rank] : begins[rank] + own[rank]]
            check_behind("sums", behind, rank, sums[rank], normalised[rank], mine, out)
        if rows is None:
            for rank in ranks:
                check_equal(f"rank {rank} against rank 0", sums[rank].double(), sums[0].double())


def collective_cases(scope: Scope) -> Iterator[Case]:
    """The plain collectives, with and without norm."""
    for world_size in scope.worlds:
        group = Group(world_size, 0, scope.device)
        for dtype in SUMMED_DTYPES:
            for turn, (n, k) in enumerate(scope.shapes):
                yield Case(
                    f"all_reduce {dtype} W={world_size} [{k}, {n}]",
                    lambda g=group, d=dtype, t=turn, n=n, k=k: check_all_reduce(scope, g, d, t, n, k),
                )
                yield Case(
                    f"reduce_scatter, all_gather {dtype} W={world_size} N={n}",
                    lambda g=group, d=dtype, t=turn, n=n: check_shards(scope, g, d, t, n),
                )


def check_all_reduce(scope: Scope, group: Group, dtype: torch.dtype, turn: int, n: int, k: int) -> None:
    """One-shot and two-shot, plain and with norm, on the same numbers; misaligned starts."""
    source = Source(scope.device, turn)
    blocks = 1 + turn % 8
    for start in (0, 1):
        xs = [source.integers(k * n + 1, dtype=dtype, bound=8)[start:] for _ in range(group.world_size)]
        for algorithm in ("one_shot", "two_shot"):
            outs = launches.all_reduce(group, xs, algorithm, blocks)
            group.synchronize()
            for rank, out in enumerate(outs):
                check_equal(f"{algorithm}, rank {rank}", out, rounded(total(xs), dtype))
    rows = [source.integers(k, n, dtype=dtype, bound=8) for _ in range(group.world_size)]
    behind = behind_of(source, turn, [k] * group.world_size, n, dtype, equal=True)
    for algorithm in ("one_shot", "two_shot"):
        sums, outs = launches.reduce_norm(group, rows, None, behind, algorithm, blocks)
        group.synchronize()
        for rank in range(group.world_size):
            check_behind(algorithm, behind, rank, sums[rank], outs[rank], total(rows), dtype)


def check_shards(scope: Scope, group: Group, dtype: torch.dtype, turn: int, n: int) -> None:
    """Shards of any length: gathered by kernel and by copy engines, exchanged, scattered, scattered with norm."""
    source, blocks = Source(scope.device, turn), 1 + turn % 8
    rows = scope.rows_of(group.world_size, turn)
    shards = [source.integers(r, n, dtype=dtype, bound=8) for r in rows]
    whole = torch.cat([x.double() for x in shards])
    for by in (blocks, 0):
        for rank, out in enumerate(launches.all_gather(group, shards, by)):
            group.synchronize()
            check_equal(f"gathered with {by} blocks, rank {rank}", out.double(), whole)
    world = group.world_size
    table = [[scope.rows[(turn + s + 2 * r) % len(scope.rows)] for r in range(world)] for s in range(world)]
    sent = [source.integers(sum(of_rank), n, dtype=dtype, bound=8) for of_rank in table]
    pieces = [x.split(of_rank) for x, of_rank in zip(sent, table, strict=True)]
    for rank, out in enumerate(launches.all_to_all(group, sent, table, blocks)):
        group.synchronize()
        expected = torch.cat([of_rank[rank].double() for of_rank in pieces])
        check_equal(f"exchanged, rank {rank}", out.double(), expected)
    xs = [source.integers(sum(rows), n, dtype=dtype, bound=8) for _ in rows]
    begins = [sum(rows[:rank]) for rank in range(group.world_size)]
    outs = launches.reduce_scatter(group, xs, rows, blocks)
    behind = behind_of(source, turn, rows, n, dtype, equal=False)
    sums, normalised = launches.reduce_norm(group, xs, rows, behind, "", blocks)
    group.synchronize()
    for rank, begin in enumerate(begins):
        mine = total(xs)[begin : begin + rows[rank]]
        check_equal(f"scattered to rank {rank}", outs[rank], rounded(mine, dtype))
        check_behind("sums", behind, rank, sums[rank], normalised[rank], mine, dtype)


def accuracy_cases(scope: Scope) -> Iterator[Case]:
    """Normal numbers: the error of the fused ops against that of one unsharded product in the same dtype."""
    for world_size in scope.worlds:
        for dtype in DTYPES:
            yield Case(
                f"accuracy {dtype} W={world_size}",
                lambda w=world_size, d=dtype: check_accuracy(scope, w, d),
            )


def check_accuracy(scope: Scope, world_size: int, dtype: torch.dtype) -> None:
    """tests/oracle.py's bound; bits equal in two runs."""
    n, k = max(scope.shapes, key=lambda shape: shape[0] * shape[1])
    rows = max(scope.rows) // world_size
    source, group = Source(scope.device, world_size), Group(world_size, 0, scope.device)
    x = source.normal(rows * world_size, k * world_size, dtype=dtype)
    weight = source.normal(n, k * world_size, dtype=dtype)
    exact, same = exact_product(x, weight), x @ weight.t()
    xs, weights = [[part.contiguous()] for part in x.chunk(world_size, 1)], weight.chunk(world_size, 1)
    shards = [[part.contiguous()] for part in weights]
    runs = [launches.gemm_reduce(group, xs, shards, None, Behind(), Options())[0] for _ in range(2)]
    group.synchronize()
    for rank in range(world_size):
        check_close(f"gemm_all_reduce, rank {rank}", runs[0][rank], exact, same)
        check_equal("second run", runs[1][rank].double(), runs[0][rank].double())
    whole = [[weight] for _ in range(world_size)]
    parts = [part.contiguous() for part in x.chunk(world_size, 0)]
    _, outs = launches.all_gather_gemm(group, parts, whole, [[None]] * world_size, Options())
    group.synchronize()
    for rank in range(world_size):
        check_close(f"all_gather_gemm, rank {rank}", outs[rank][0], exact, same)


def cases(scope: Scope) -> Iterator[Case]:
    """Everything of this part."""
    yield from gemm_cases(scope)
    yield from fused_cases(scope)
    yield from collective_cases(scope)
    yield from accuracy_cases(scope)
