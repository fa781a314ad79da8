"""Regions and plain collectives: values and gradients, against sums and slices of the data of all ranks.

Small integers throughout, so everything is compared with ``==``. In a region the gradient outside is
replicated; the plain collectives have true adjoints, so their gradients are tested with a different one
on every rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import interlace
import interlace.functional as il
from tests import oracle
from tests.distributed import run_distributed
from tests.ops.linears import FLOATS

WORLDS = (1, 2, 3, 4)
SHAPES = ((0,), (1,), (3,), (7, 5), (2, 8, 3), (2, 3, 4, 5), (130, 64), (3, 0, 2), (4096,))


def draw(shape: tuple[int, ...], dtype: torch.dtype, layout: str, count: int, seed: int) -> list[Tensor]:
    """One tensor per rank, the same list on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return [oracle.LAYOUTS[layout](oracle.integers(shape, dtype, generator)) for _ in range(count)]


def total(parts: list[Tensor]) -> Tensor:
    return torch.stack([part.double() for part in parts]).sum(0)


def forward_backward(fn, x: Tensor, grads: list[Tensor], rank: int) -> tuple[Tensor, Tensor]:
    leaf = x.detach().requires_grad_()
    out = fn(leaf)
    (grad_x,) = torch.autograd.grad(out, leaf, grads[rank])
    return out.detach(), grad_x


def settings() -> Iterator[tuple[tuple[int, ...], torch.dtype, str]]:
    for shape, dtype in itertools.product(SHAPES, FLOATS):
        yield shape, dtype, "contiguous"
    for layout in oracle.LAYOUTS:
        yield (6, 10), torch.float32, layout
        yield (5, 3, 7), torch.bfloat16, layout


def check_pair(
    what: str, pair: tuple[Tensor, Tensor], out: Tensor, grad_x: Tensor, dtype: torch.dtype
) -> None:
    oracle.check_equal(f"out of {what}", pair[0], out.double())
    oracle.check_equal(f"grad_x of {what}", pair[1], grad_x.double())
    if pair[0].dtype != dtype or pair[1].dtype != dtype:
        raise AssertionError(f"{what}: out {pair[0].dtype}, grad_x {pair[1].dtype}")


def same_shape_ops(rank: int, world_size: int) -> None:
    for shape, dtype, layout in settings():
        xs = draw(shape, dtype, layout, world_size, 1)
        gs = draw(shape, dtype, layout, world_size, 2)
        what, own = f"{shape} {dtype} {layout}", (xs[rank], gs, rank)
        pair = forward_backward(lambda x: il.all_reduce(x, group=None), *own)
        check_pair(f"all_reduce {what}", pair, total(xs), total(gs), dtype)
        pair = forward_backward(lambda x: il.copy_to_region(x, group=None), *own)
        check_pair(f"copy_to_region {what}", pair, xs[rank], total(gs), dtype)
        pair = forward_backward(lambda x: il.reduce_from_region(x, group=None), *own)
        check_pair(f"reduce_from_region {what}", pair, total(xs), gs[rank], dtype)


def cut_ops(rank: int, world_size: int) -> None:
    for shape, dtype, layout in settings():
        for dim in range(-len(shape), len(shape)):
            scatter_along(shape, dtype, layout, dim, rank, world_size)
            gather_along(shape, dtype, layout, dim, rank, world_size)


def own_chunk(x: Tensor, dim: int, rank: int, world_size: int) -> Tensor:
    return oracle.chunk(x, dim, rank, world_size)


def chunks(shape: tuple[int, ...], dim: int, world_size: int) -> list[tuple[int, ...]]:
    shapes = []
    for size in oracle.chunk_sizes(shape[dim], world_size):
        cut = list(shape)
        cut[dim] = size
        shapes.append(tuple(cut))
    return shapes


def draw_chunks(shape, dtype, layout, dim, world_size, seed) -> list[Tensor]:
    return [draw(cut, dtype, layout, 1, seed + r)[0] for r, cut in enumerate(chunks(shape, dim, world_size))]


def scatter_along(shape, dtype, layout, dim, rank, world_size) -> None:
    xs = draw(shape, dtype, layout, world_size, 3)
    gs = draw_chunks(shape, dtype, layout, dim, world_size, 40)
    whole_grad = torch.cat([g.double() for g in gs], dim)
    what = f"{shape} dim={dim} {dtype} {layout}"
    pair = forward_backward(lambda x: il.reduce_scatter(x, group=None, dim=dim), xs[rank], gs, rank)
    check_pair(f"reduce_scatter {what}", pair, own_chunk(total(xs), dim, rank, world_size), whole_grad, dtype)
    pair = forward_backward(lambda x: il.scatter_to_region(x, group=None, dim=dim), xs[0], gs, rank)
    check_pair(f"scatter_to_region {what}", pair, own_chunk(xs[0], dim, rank, world_size), whole_grad, dtype)


def gather_along(shape, dtype, layout, dim, rank, world_size) -> None:
    xs = draw_chunks(shape, dtype, layout, dim, world_size, 50)
    gs = draw(shape, dtype, layout, world_size, 5)
    whole = torch.cat([x.double() for x in xs], dim)
    what = f"{shape} dim={dim} {dtype} {layout}"
    pair = forward_backward(lambda x: il.all_gather(x, group=None, dim=dim), xs[rank], gs, rank)
    check_pair(f"all_gather {what}", pair, whole, own_chunk(total(gs), dim, rank, world_size), dtype)
    for size in (None, shape[dim]):
        pair = forward_backward(
            lambda x, size=size: il.gather_from_region(x, group=None, dim=dim, size=size), xs[rank], gs, rank
        )
        own = own_chunk(gs[rank], dim, rank, world_size)
        check_pair(f"gather_from_region {what} size={size}", pair, whole, own, dtype)


def exchange(rank: int, world_size: int) -> None:
    tables = [
        [[2] * world_size for _ in range(world_size)],
        [[(s + 2 * d) % 4 for d in range(world_size)] for s in range(world_size)],  # rows that s sends to d
        [[5 * (d == 0) for d in range(world_size)] for _ in range(world_size)],
        [[0] * world_size for _ in range(world_size)],
    ]
    for (number, table), width, dtype in itertools.product(enumerate(tables), ((), (3,), (2, 5)), FLOATS):
        sent = [draw((sum(row), *width), dtype, "contiguous", 1, 60 + s)[0] for s, row in enumerate(table)]
        received = [[table[s][d] for s in range(world_size)] for d in range(world_size)]
        grads = [
            draw((sum(row), *width), dtype, "contiguous", 1, 70 + d)[0] for d, row in enumerate(received)
        ]
        sizes = (None, None) if number == 0 else (received[rank], table[rank])

        def call(x: Tensor, sizes=sizes) -> Tensor:
            return il.all_to_all(x, *sizes, group=None)

        pair = forward_backward(call, sent[rank], grads, rank)
        out = torch.cat([torch.split(sent[s], table[s])[rank] for s in range(world_size)])
        grad_x = torch.cat([torch.split(grads[d], received[d])[rank] for d in range(world_size)])
        check_pair(f"all_to_all {table} {width} {dtype}", pair, out, grad_x, dtype)


@pytest.mark.parametrize("worker", [same_shape_ops, cut_ops, exchange])
@pytest.mark.parametrize("world_size", WORLDS)
def test_values_and_gradients(world_size: int, worker) -> None:
    """Catches a wrong rank order, cut, stride, count or adjoint; fewer elements than ranks; nothing at
    all."""
    run_distributed(world_size, worker, timeout=180)


def skewed_gather(rank: int, world_size: int) -> None:
    sizes = [0, 5, 1, 3][:world_size]
    xs = [torch.arange(float(s * 2)).view(s, 2) + 10 * r for r, s in enumerate(sizes)]
    gs = draw((sum(sizes), 2), torch.float32, "contiguous", world_size, 6)
    pair = forward_backward(lambda x: il.all_gather(x, group=None), xs[rank], gs, rank)
    own = total(gs)[sum(sizes[:rank]) : sum(sizes[: rank + 1])]
    check_pair(f"all_gather {sizes}", pair, torch.cat(xs), own, torch.float32)
    pair = forward_backward(lambda x: il.gather_from_region(x, group=None, dim=0), xs[rank], gs, rank)
    own = gs[rank][sum(sizes[:rank]) : sum(sizes[: rank + 1])]
    check_pair(f"gather_from_region {sizes}", pair, torch.cat(xs), own, torch.float32)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_gather_takes_shards_of_any_length(world_size: int) -> None:
    """Catches a backward that cuts the gradient like torch.chunk when the shards were not."""
    run_distributed(world_size, skewed_gather)


def sum_of_many_sizes(rank: int, world_size: int) -> None:
    for numel in [1, 2, 3, 15, 16, 17, 4095, 4097, 65535, 65537, 1 << 20, (1 << 20) + 1]:
        for dtype in (torch.float32, torch.bfloat16):
            xs = [torch.full((numel,), float(r + 1), dtype=dtype) for r in range(world_size)]
            xs[rank][-1] += rank
            out = il.all_reduce(xs[rank], group=None)
            expected = torch.full((numel,), world_size * (world_size + 1) / 2)
            expected[-1] += world_size * (world_size - 1) / 2
            oracle.check_equal(f"all_reduce {numel} {dtype}", out, expected.double())
            oracle.check_equal(
                "x after all_reduce", xs[rank][:-1], torch.full((numel - 1,), rank + 1.0).double()
            )


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_reduce_of_every_size_leaves_its_input_alone(world_size: int) -> None:
    """Catches an algorithm switch that drops a tail, and an op that sums into its input."""
    run_distributed(world_size, sum_of_many_sizes)


def random_sums(rank: int, world_size: int) -> None:
    for dtype, numel in itertools.product(FLOATS, (1000, 100_000)):
        xs = [oracle.normals((numel,), dtype, torch.Generator().manual_seed(r)) for r in range(world_size)]
        out = il.all_reduce(xs[rank], group=None)
        wide = torch.float32 if dtype.itemsize == 2 else dtype
        once = torch.stack(xs).to(wide).sum(0).to(dtype)
        oracle.check_close(f"all_reduce {numel} {dtype}", out, total(xs), once)
        oracle.check_same_on_all_ranks(f"all_reduce {numel} {dtype}", out)
        oracle.check_bitwise(f"all_reduce {numel} {dtype}", [out], [il.all_reduce(xs[rank], group=None)])
        part = il.reduce_scatter(xs[rank], group=None)
        mine = oracle.chunk(out, 0, rank, world_size)
        oracle.check_bitwise(f"reduce_scatter and all_reduce {numel} {dtype}", [part], [mine])


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_half_precision_sums_round_once(world_size: int) -> None:
    """Catches a sum kept in bf16 between ranks: against the fp32 sum rounded once it is beyond the bound."""
    run_distributed(world_size, random_sums)


def int_sums(rank: int, world_size: int) -> str:
    try:
        out = interlace.functional.all_reduce(torch.full((5,), rank + (1 << 40)), group=None)
    except TypeError as error:
        return str(error)
    expected = sum(r + (1 << 40) for r in range(world_size))
    oracle.check_equal("all_reduce of int64", out, torch.full((5,), expected))
    dist.barrier()
    return "summed"


@pytest.mark.parametrize("world_size", [2, 3])
def test_integers_are_summed_exactly_or_refused(world_size: int) -> None:
    """Catches integers that go through floating point and come out rounded."""
    for answer in run_distributed(world_size, int_sums):
        assert answer == "summed" or ("all_reduce" in answer and "int64" in answer)
