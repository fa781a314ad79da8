"""Products in pieces under torch.distributed: on gloo the code that serves GPUs without peer access."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import interlace
import interlace.functional as il
from interlace import decomposed, reference
from tests import oracle
from tests.distributed import run_distributed
from tests.ops.linears import OPS, Case, check

WORLDS = (1, 2, 3, 4)

# lead, k, n: one row, fewer rows than ranks, uneven shards, three dims, and enough rows for two pieces
CASES = (
    Case((1,), 5, 3),
    Case((7,), 12, 10, x_layout="transposed", weight_layout="every_other_row"),
    Case((2, 5), 9, 8, dim=1, weights=2),
    Case((3, 2, 4), 8, 6, dim=-2, bias=False, dtype=torch.float64),
    Case((13,), 8, 9, dim=-1),
    Case((0,), 4, 4),
    Case((33,), 64, 48, torch.bfloat16, exact=False),
    Case((33,), 64, 48, torch.float16, exact=False, give_size=False),
)


def every_linear(rank: int, world_size: int) -> list[str]:
    """Each linear by its decomposed form, forward and backward, against the unsharded layer."""
    algorithms = set()
    with interlace.backend("decomposed"):
        for name in OPS:
            for case in CASES:
                check(name, case)
                algorithms.add(interlace.last_path().algorithm)
    return sorted(algorithms)


@pytest.mark.parametrize("world_size", WORLDS)
def test_decomposed_linears_equal_the_unsharded_layer(world_size: int) -> None:
    """Catches a wrong partner in a step, rows of another rank's shard, a bias added by every rank, a lost piece."""
    for algorithms in run_distributed(world_size, every_linear):
        assert world_size == 1 or "decomposed" in algorithms


def in_pieces(rank: int, world_size: int) -> None:
    """An all-reduce long enough to be cut, and the same without overlap: bitwise one result on all ranks."""
    generator = torch.Generator().manual_seed(5)
    rows = 2 * world_size * 512 + 3
    xs = [oracle.integers((rows, 4), torch.float32, generator) for _ in range(world_size)]
    weights = [oracle.integers((6, 4), torch.float32, generator) for _ in range(world_size)]
    residual = oracle.integers((rows, 6), torch.float32, generator)
    name = interlace.resolve(None).name
    exact = sum(x @ w.t() for x, w in zip(xs, weights, strict=True))
    for overlapped in (True, False):
        out = decomposed.gemm_all_reduce(xs[rank], weights[rank], None, name, overlapped=overlapped)
        oracle.check_equal("all-reduce", out, exact)
        summed = decomposed.sum_gemm_all_reduce(
            [xs[rank]] * 2, [weights[rank]] * 2, name, overlapped=overlapped
        )
        oracle.check_equal("sum of two", summed, 2 * exact)
        _, total = decomposed.gemm_all_reduce_norm(
            xs[rank], weights[rank], None, residual, torch.ones(6), 1e-6, name, overlapped=overlapped
        )
        oracle.check_equal("with residual", total, exact + residual)
        part = decomposed.gemm_reduce_scatter(xs[rank], weights[rank], None, 0, name, overlapped=overlapped)
        oracle.check_equal("reduce-scatter", part, oracle.chunk(exact, 0, rank, world_size))


@pytest.mark.parametrize("world_size", WORLDS)
def test_pieces_of_an_all_reduce_are_put_together_again(world_size: int) -> None:
    """Catches rows of one piece in the place of another, and sums that are shared before they are complete."""
    run_distributed(world_size, in_pieces)


def deterministic(rank: int, world_size: int) -> None:
    x, weight = torch.randn(50, 32).bfloat16(), torch.randn(24, 32).bfloat16()
    with interlace.backend("decomposed"), torch.no_grad():
        first = il.linear_all_reduce(x, weight, group=None)
        second = il.linear_all_reduce(x, weight, group=None)
    oracle.check_bitwise("two runs", [first], [second])
    oracle.check_same_on_all_ranks("all ranks", first)


@pytest.mark.parametrize("world_size", [3])
def test_decomposed_sums_are_the_same_in_every_run_and_on_every_rank(world_size: int) -> None:
    """Catches sums in the order of arrival."""
    run_distributed(world_size, deterministic)


def lengths(rank: int, world_size: int) -> str:
    """Parts that the ranks ask for, one of them empty; a sum that does not fit is refused on all ranks."""
    total, name = 10, interlace.resolve(None).name
    mine = [0, 7, 3, 0][rank] if world_size > 2 else [4, 6][rank]
    generator = torch.Generator().manual_seed(3)
    x = oracle.integers((total, 4), torch.float32, generator)
    weight = oracle.integers((5, 4), torch.float32, generator)
    out = decomposed.gemm_reduce_scatter(x, weight, None, 0, name, mine)
    begin = sum(([0, 7, 3, 0] if world_size > 2 else [4, 6])[:rank])
    oracle.check_equal("own length", out, world_size * (x @ weight.t())[begin : begin + mine])
    shards = reference.all_gather(out, 0, name)
    whole, (again,) = decomposed.all_gather_gemm(out, [torch.eye(5)], [None], 0, name, True)
    oracle.check_equal("uneven gather", whole, shards)
    oracle.check_equal("uneven product", again, shards)
    try:
        decomposed.gemm_reduce_scatter(x, weight, None, 0, name, mine + 1)
    except ValueError as error:
        dist.barrier()
        return str(error)
    return "accepted"


@pytest.mark.parametrize("world_size", [2, 3])
def test_decomposed_parts_may_have_any_length(world_size: int) -> None:
    """Catches a rank that sends to a peer which expects nothing, and hangs."""
    for answer in run_distributed(world_size, lengths):
        assert "add up to" in answer and "has 10" in answer
