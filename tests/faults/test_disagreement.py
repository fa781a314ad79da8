"""Ranks that make different calls, bad calls or no call: everyone raises, and the group works afterwards."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import interlace.functional as il
from tests import oracle
from tests.distributed import run_distributed
from tests.faults.rig import Ending, attempt, check_health, restart

f32, bf16, f64 = torch.float32, torch.bfloat16, torch.float64


def _row(m: int, n: int, dtype: torch.dtype = f32, **options: int) -> Callable[[], Tensor]:
    return lambda: il.linear_reduce_scatter(
        torch.ones(m, 8, dtype=dtype), torch.ones(n, 8, dtype=dtype), group=None, **options
    )


def _reduce(m: int, n: int, dtype: torch.dtype = f32) -> Callable[[], Tensor]:
    return lambda: il.linear_all_reduce(
        torch.ones(m, 8, dtype=dtype), torch.ones(n, 8, dtype=dtype), group=None
    )


def _gather(k: int, dtype: torch.dtype = f32, count: int = 1, **options: int) -> Callable[[], object]:
    weights = [torch.ones(4, k, dtype=dtype)] * count
    return lambda: il.all_gather_linear(torch.ones(3, k, dtype=dtype), weights, group=None, **options)


def _plain(*shape: int, dtype: torch.dtype = f32) -> Callable[[], Tensor]:
    return lambda: il.all_reduce(torch.ones(shape, dtype=dtype), group=None)


# name -> (what rank 0 calls, what the others call, what both texts must contain)
MISMATCHES: dict[str, tuple[Callable[[], object], Callable[[], object], list[str]]] = {
    "ops": (_reduce(6, 8), _row(6, 8), ["gemm_all_reduce", "gemm_reduce_scatter"]),
    "ops of one result shape": (_plain(6, 8), _reduce(6, 8), ["all_reduce", "gemm_all_reduce"]),
    "rows": (_reduce(6, 8), _reduce(7, 8), ["6", "7"]),
    "many rows": (_reduce(600, 8), _reduce(3, 8), ["600", "3"]),
    "columns": (_row(6, 8), _row(6, 9), ["8", "9"]),
    "shapes of equal size": (_plain(6, 8), _plain(8, 6), ["6, 8", "8, 6"]),
    "elements": (_plain(1 << 20), _plain(1 << 19), [str(1 << 20), str(1 << 19)]),
    "dtypes": (_reduce(6, 8), _reduce(6, 8, bf16), ["float32", "bfloat16"]),
    "dtypes of a sum": (_plain(6, dtype=bf16), _plain(6), ["bfloat16", "float32"]),
    "dims": (_row(6, 8), _row(6, 8, scatter_dim=1), ["dim"]),
    "k of a gather": (_gather(8), _gather(9), ["8", "9"]),
    "products of a gather": (_gather(8), _gather(8, count=2), ["weights"]),
    "one fused, one on torch.distributed": (_plain(6, dtype=f64), _plain(6), ["float32"]),
}


def mismatch(rank: int, world_size: int, name: str) -> list[Ending]:
    restart(timeout=10.0)
    mine = MISMATCHES[name][0 if rank == 0 else 1]
    endings = [attempt(mine), attempt(mine)]
    check_health()
    return endings


@pytest.mark.parametrize("name", MISMATCHES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_different_calls_abort_on_all_ranks(world_size: int, name: str) -> None:
    """Catches wrong sums from mismatched calls, and ranks that stay a call behind afterwards."""
    for endings in run_distributed(world_size, mismatch, name):
        for ending in endings:
            assert ending.error == "CollectiveAborted" and ending.seconds < 5, ending
            assert all(word in ending.text for word in MISMATCHES[name][2]), ending


def swapped(rank: int, world_size: int) -> list[Ending]:
    restart(timeout=10.0)
    calls = [_reduce(6, 8), _gather(8), _plain(5)]
    endings = [attempt(call) for call in (calls if rank == 0 else reversed(calls))]
    check_health()
    return endings


@pytest.mark.parametrize("world_size", [2, 4])
def test_swapped_order_aborts_the_calls_that_do_not_match(world_size: int) -> None:
    """Catches ranks that wait for each other in different calls; the call in the middle is the same and
    works."""
    for endings in run_distributed(world_size, swapped):
        assert [e.error for e in endings] == ["CollectiveAborted", "", "CollectiveAborted"], endings


class Tiny(torch.autograd.Function):
    """Fails in backward on one rank: an error of the user's in the middle of a graph."""

    @staticmethod
    def forward(ctx, x: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.fails:
            raise ZeroDivisionError("on this rank only")
        return grad, None


BAD: dict[str, tuple[Callable[[], object], str, str]] = {
    "weight of another k": (
        lambda: il.linear_all_reduce(torch.ones(3, 8), torch.ones(4, 9), group=None),
        "ValueError",
        "linear_all_reduce",
    ),
    "gather of another k": (
        lambda: il.all_gather_linear(torch.ones(3, 8), torch.ones(4, 9), group=None),
        "ValueError",
        "all_gather_linear",
    ),
    "bias of another n": (
        lambda: il.linear_reduce_scatter(torch.ones(3, 8), torch.ones(4, 8), torch.ones(5), group=None),
        "ValueError",
        "linear_reduce_scatter",
    ),
    "fp32 x with bf16 weight": (
        lambda: il.linear_all_reduce(torch.ones(3, 8), torch.ones(4, 8, dtype=bf16), group=None),
        "TypeError",
        "bfloat16",
    ),
    "bf16 bias": (
        lambda: il.all_gather_linear(
            torch.ones(3, 8), torch.ones(4, 8), torch.ones(4, dtype=bf16), group=None
        ),
        "TypeError",
        "bfloat16",
    ),
    "integers": (
        lambda: il.linear_all_reduce(
            torch.ones(3, 8, dtype=torch.int64), torch.ones(4, 8, dtype=torch.int64), group=None
        ),
        "TypeError",
        "int64",
    ),
    "complex numbers": (
        lambda: il.all_reduce(torch.ones(3, dtype=torch.complex64), group=None),
        "TypeError",
        "omplex",
    ),
    "scatter_dim": (
        lambda: il.linear_reduce_scatter(torch.ones(3, 8), torch.ones(4, 8), group=None, scatter_dim=2),
        "ValueError",
        "scatter_dim",
    ),
    "gather_dim": (
        lambda: il.all_gather_linear(torch.ones(3, 8), torch.ones(4, 8), group=None, gather_dim=-3),
        "ValueError",
        "gather_dim",
    ),
    "dim of reduce_scatter": (
        lambda: il.reduce_scatter(torch.ones(3), group=None, dim=1),
        "ValueError",
        "dim",
    ),
    "dim of all_gather": (lambda: il.all_gather(torch.ones(()), group=None), "ValueError", "all_gather"),
    "scalar x": (
        lambda: il.linear_all_reduce(torch.ones(()), torch.ones(4, 8), group=None),
        "ValueError",
        "linear_all_reduce",
    ),
    "weight of three dims": (
        lambda: il.linear_all_reduce(torch.ones(3, 8), torch.ones(1, 4, 8), group=None),
        "ValueError",
        "linear_all_reduce",
    ),
    "more biases than weights": (
        lambda: il.all_gather_linear(torch.ones(3, 8), [torch.ones(4, 8)], [None, None], group=None),
        "ValueError",
        "biases",
    ),
    "no weights": (lambda: il.all_gather_linear(torch.ones(3, 8), [], group=None), "ValueError", "weight"),
    "gather_size": (
        lambda: il.all_gather_linear(torch.ones(3, 8), torch.ones(4, 8), group=None, gather_size=1000),
        "ValueError",
        "gather_size",
    ),
    "split sizes": (
        lambda: il.all_to_all(torch.ones(6), [1, 2], [3, 4], group=None),
        "ValueError",
        "split_sizes",
    ),
    "count of split sizes": (
        lambda: il.all_to_all(torch.ones(6), [6], [6], group=None),
        "ValueError",
        "output_split_sizes",
    ),
}


def bad_everywhere(rank: int, world_size: int) -> dict[str, Ending]:
    restart(timeout=10.0)
    endings = {}
    for name, (call, _, _) in BAD.items():
        endings[name] = attempt(call)
        check_health()
    return endings


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_bad_arguments_are_refused_on_every_rank_before_any_signal(world_size: int) -> None:
    """Catches errors that differ between ranks, internal errors shown to users, and counters that run
    apart."""
    for endings in run_distributed(world_size, bad_everywhere):
        wrong = {}
        for name, ending in endings.items():
            _, error, word = BAD[name]
            expected = (error, "CollectiveAborted")  # a peer may have refused the same call a moment earlier
            if world_size == 1 and name in ("complex numbers", "gather_size", "count of split sizes"):
                continue  # one rank needs no collective: torch itself may take these
            if ending.error not in expected or word not in ending.text or ending.seconds > 5:
                wrong[name] = ending
        assert not wrong, "\n".join(f"{name}: {ending}" for name, ending in wrong.items())


def bad_on_one(rank: int, world_size: int, culprit: int) -> dict[str, Ending]:
    restart(timeout=10.0)
    endings = {}
    for name, (call, _, _) in BAD.items():
        good = _reduce(6, 8)
        endings[name] = attempt(call if rank == culprit else good)
        check_health()
    return endings


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_bad_argument_on_one_rank_aborts_its_peers_with_the_reason(world_size: int) -> None:
    """Catches peers that wait out the deadline while one rank has long raised."""
    results = run_distributed(world_size, bad_on_one, 1)
    wrong = {}
    for rank, endings in enumerate(results):
        for name, ending in endings.items():
            _, error, word = BAD[name]
            expected = error if rank == 1 else "CollectiveAborted"
            if ending.error != expected or word not in ending.text or ending.seconds > 5:
                wrong[f"{name}, rank {rank}"] = ending
    assert not wrong, "\n".join(f"{name}: {ending}" for name, ending in wrong.items())


def user_error(rank: int, world_size: int) -> list[Ending]:
    """Rank 0 raises on its own and skips a call. Peers run into the deadline; then all are in step again."""
    restart(timeout=1.0)
    endings = [] if rank == 0 else [attempt(_reduce(6, 8))]
    dist.barrier()
    if rank == 0:
        endings.append(attempt(_reduce(6, 8)))
    dist.barrier()
    check_health()
    return endings


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_skips_a_call_is_told_when_it_comes_back(world_size: int) -> None:
    """Catches results of one call that are handed to the next."""
    results = run_distributed(world_size, user_error)
    assert results[0][0].error == "CollectiveAborted" and results[0][0].seconds < 1, results[0]
    errors = [endings[0].error for endings in results[1:]]
    assert "CollectiveTimeout" in errors and set(errors) <= {"CollectiveTimeout", "CollectiveAborted"}, (
        results
    )


def error_in_backward(rank: int, world_size: int) -> list[Ending]:
    restart(timeout=1.0)
    endings = []
    for fails in (True, False):
        x = torch.ones(4, 8, requires_grad=True)
        inner = il.copy_to_region(x, group=None)
        out = Tiny.apply(inner, fails and rank == 0)
        endings.append(attempt(out.sum().backward))
        dist.barrier()
        if fails and rank == 0:
            endings.append(attempt(_plain(4, 8)))  # catches up with the call that its peers have given up
        dist.barrier()
        if not fails:
            oracle.check_equal("grad_x", x.grad, torch.full((4, 8), float(world_size)))
    check_health()
    return endings


def test_an_error_inside_backward_reaches_the_peers() -> None:
    """Catches a backward thread that waits for ever for a rank whose graph ended early."""
    results = run_distributed(2, error_in_backward)
    assert [e.error for e in results[0]] == ["ZeroDivisionError", "CollectiveAborted", ""], results[0]
    assert [e.error for e in results[1]] == ["CollectiveTimeout", ""], results[1]


def deadline(rank: int, world_size: int, call: str) -> Ending | None:
    restart(timeout=0.5)
    calls = {
        "linear_all_reduce": _reduce(300, 8),
        "linear_reduce_scatter": _row(6, 8),
        "all_gather_linear": _gather(8),
        "all_reduce": _plain(5),
    }
    ending = None if rank == 0 else attempt(calls[call])
    dist.barrier()
    if rank == 0:
        attempt(calls[call])
    dist.barrier()
    check_health()
    return ending


@pytest.mark.parametrize(
    "call", ["linear_all_reduce", "linear_reduce_scatter", "all_gather_linear", "all_reduce"]
)
def test_the_deadline_names_op_rank_peer_chunk_want_and_seen(call: str) -> None:
    """Catches a time-out that only says that something timed out."""
    ending = run_distributed(2, deadline, call)[1]
    op = {"linear_all_reduce": "gemm_all_reduce", "linear_reduce_scatter": "gemm_reduce_scatter",
          "all_gather_linear": "all_gather_gemm", "all_reduce": "all_reduce"}[call]  # fmt: skip
    assert ending.error == "CollectiveTimeout" and 0.4 < ending.seconds < 3, ending
    for pattern in (
        op,
        r"group '[^']+'",
        "rank 1 of 2",
        r"for rank 0",
        r"chunk \d+",
        r"wanted .*epoch \d+",
        r"seen .*\d+",
    ):
        assert re.search(pattern, ending.text), (pattern, ending)
