"""The four parallel linears equal the unsharded layer: outputs and all gradients, for the shapes people
really have.

Exact cases use small integers, whose sums are exact in every order, so they are compared with ``==``. One
worker call holds a whole family of cases, because on two cores a call costs more than a case.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch

import interlace
from tests import oracle
from tests.distributed import run_distributed
from tests.ops.linears import FLOATS, OPS, Case, check, compare, run

WORLDS = (1, 2, 3, 4)
NAMES = tuple(OPS)
ODD_K = (1, 7, 63, 64, 65, 512, 1030)
ODD_N = (1, 5, 49, 103)


def sweep_cases() -> Iterator[Case]:
    """Every M from none to more than two tiles; K and N change along, none of them a multiple of all
    worlds."""
    for m in range(131):
        k, n = ODD_K[m % len(ODD_K)], ODD_N[m % len(ODD_N)]
        for dtype in (torch.float32, torch.bfloat16):
            yield Case((m,), k, n, dtype, seed=m)


def size_cases() -> Iterator[Case]:
    for k, n, (m, dtype) in itertools.product(
        ODD_K, ODD_N, [(6, torch.bfloat16), (33, torch.float32), (5, torch.float16)]
    ):
        yield Case((m,), k, n, dtype, bias=(k + n) % 2 == 0, seed=k + n)
    for m, (k, n) in itertools.product((0, 1, 2, 3, 40, 128), [(7, 5), (65, 49)]):
        yield Case((m,), k, n, torch.float64)
        yield Case((m,), k, n, torch.float16, bias=False)


def dim_cases() -> Iterator[Case]:
    """2-D to 4-D, every dim, counted from both ends; sizes that leave a rank short or with nothing."""
    for lead in [(5,), (2, 8), (3, 4), (2, 3, 4), (1, 2, 5)]:
        for dim in range(-len(lead) - 1, len(lead) + 1):
            for dtype in (torch.float32, torch.bfloat16):
                yield Case(lead, 12, 7, dtype, dim=dim)
    yield Case((2, 0, 3), 12, 7, dim=1)
    yield Case((0, 4), 12, 7, dim=1)


def layout_cases() -> Iterator[Case]:
    base = Case((9, 6), 20, 13)
    for dtype, layout in itertools.product((torch.float32, torch.bfloat16), oracle.LAYOUTS):
        yield dataclasses.replace(base, dtype=dtype, x_layout=layout, dim=1)
        yield dataclasses.replace(base, dtype=dtype, grad_layout=layout)
        if layout != "one_value":
            yield dataclasses.replace(base, dtype=dtype, weight_layout=layout, dim=-2)
        yield dataclasses.replace(base, lead=(70,), dtype=dtype, x_layout=layout, grad_layout=layout)
    yield dataclasses.replace(base, x_layout="sliced", weight_layout="transposed", grad_layout="one_value")
    yield dataclasses.replace(
        base, x_layout="transposed", weight_layout="every_other_row", grad_layout="offset"
    )


def other_cases() -> Iterator[Case]:
    """Frozen weight, several products of one gather, total length not given."""
    for dtype, bias in itertools.product(FLOATS, (True, False)):
        yield Case((11,), 24, 10, dtype, bias=bias, frozen=True)
        for weights in (2, 3):
            yield Case((12, 2), 24, 10, dtype, bias=bias, weights=weights)
            yield Case((7,), 24, 10, dtype, bias=bias, weights=weights, frozen=True)
    yield Case((12,), 24, 10, give_size=False)
    yield Case((12, 3), 24, 10, torch.bfloat16, give_size=False, weights=2)


def random_cases() -> Iterator[Case]:
    """Normal numbers: the error against fp64 is what is tested, so K is long and M crosses the algorithms."""
    for dtype, m, k in itertools.product(FLOATS, (1, 17, 64, 130, 257), (65, 256, 1030)):
        yield Case((m,), k, 96 if m > 1 else 400, dtype, exact=False, seed=m)
    yield Case((3, 50), 512, 103, torch.bfloat16, dim=1, exact=False, weights=2)
    yield Case(
        (3, 50),
        512,
        103,
        torch.float32,
        dim=1,
        exact=False,
        x_layout="transposed",
        weight_layout="transposed",
    )


def packed_cases() -> Iterator[Case]:
    """Frozen weights in the layout of the tile engine; decode and prefill, tails in every direction."""
    sizes = [(1, 1), (7, 103), (64, 64), (65, 49), (512, 130)]
    for m, (k, n), dtype in itertools.product(
        (0, 1, 3, 16, 64, 65, 130), sizes, (torch.float32, torch.bfloat16)
    ):
        yield Case((m,), k, n, dtype, frozen=True, packed=True, bias=m % 2 == 0, seed=m)
    yield Case(
        (3, 20), 64, 49, dim=1, frozen=True, packed=True, x_layout="transposed", weight_layout="transposed"
    )
    yield Case(
        (3, 20), 64, 49, torch.bfloat16, dim=-2, frozen=True, packed=True, weights=3, grad_layout="one_value"
    )
    for dtype, m, k in itertools.product((torch.float32, torch.bfloat16), (1, 64, 257), (128, 256, 512)):
        yield Case((m,), k, 96 if m > 1 else 400, dtype, frozen=True, packed=True, exact=False)


FAMILIES = {
    f.__name__: f
    for f in (sweep_cases, size_cases, dim_cases, layout_cases, other_cases, packed_cases, random_cases)
}


def accepts(name: str, case: Case) -> bool:
    """Several weights belong to the ops with one input for all."""
    return case.weights == 1 or name in ("all_gather_linear", "column_linear")


def run_family(rank: int, world_size: int, name: str, family: str, backend: str) -> int:
    count = 0
    chosen = interlace.backend(backend) if backend else contextlib.nullcontext()
    with chosen, oracle.poisoned(1 << 18):
        for case in FAMILIES[family]():
            if accepts(name, case):
                check(name, case)
                count += 1
    return count


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world_size", WORLDS)
def test_equals_the_unsharded_layer(world_size: int, name: str, family: str) -> None:
    """Catches wrong rows, tails, strides, dims, bias and gradients; the failing case is in the message."""
    counts = run_distributed(world_size, run_family, name, family, "", timeout=180)
    assert counts[0] >= 8 and len(set(counts)) == 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_reference_path_equals_the_unsharded_layer(world_size: int, name: str) -> None:
    """Catches an oracle and fallback that is wrong itself."""
    for family in ("dim_cases", "random_cases"):
        run_distributed(world_size, run_family, name, family, "reference", timeout=180)


def lower_instruction_sets() -> list[str]:
    """What the binary has besides the best this machine runs, which all other tests use."""
    built = ("generic", "avx2", "avx512")
    return list(built[: built.index(torch.ops.interlace.engine_info()[0])])


@pytest.mark.parametrize("isa", lower_instruction_sets())
def test_every_instruction_set_equals_the_unsharded_layer(isa: str) -> None:
    """Catches kernels that only the machine of the user has: each build in the binary is run, capped by name."""
    for name, family in itertools.product(NAMES, ("sweep_cases", "packed_cases")):
        run_distributed(2, run_family, name, family, "", env={"INTERLACE_ISA": isa}, timeout=180)


def repeat_with_nan_between(rank: int, world_size: int, name: str) -> None:
    """The workspace holds NaN of a larger call when the next call begins."""
    for dtype, m in itertools.product((torch.float32, torch.bfloat16), (1, 5, 64, 130)):
        case = Case((m,), 65, 49, dtype, exact=False, seed=m)
        local, first = run(name, case)
        dirty = Case((2 * m + 9,), 130, 98, dtype, exact=False)
        nan_local = OPS[name][0](dirty, rank, world_size)
        nan_local.x.fill_(float("nan"))
        OPS[name][1](nan_local.x, nan_local.weights, nan_local.biases, dirty, None)
        _, second = run(name, case)
        compare(f"{name} {case} after NaN", case, local, second)
        oracle.check_bitwise(f"{name} {case}", first.tensors(), second.tensors())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world_size", WORLDS)
def test_two_runs_are_bitwise_equal_whatever_the_workspace_held(world_size: int, name: str) -> None:
    """Catches a sum whose order depends on timing, and a read of staging memory that the call did not
    write."""
    run_distributed(world_size, repeat_with_nan_between, name)


def compare_ranks(rank: int, world_size: int) -> None:
    for dtype, m in itertools.product(
        (torch.float32, torch.bfloat16, torch.float16), (1, 3, 64, 65, 128, 200)
    ):
        case = Case((m,), 130, 70, dtype, exact=False, seed=m)
        _, row = run("linear_all_reduce", case)
        oracle.check_same_on_all_ranks(f"out of linear_all_reduce {case}", row.outs[0])
        oracle.check_same_on_all_ranks(f"grad_bias of linear_all_reduce {case}", row.grad_biases[0])
        _, column = run("column_linear", case)
        oracle.check_same_on_all_ranks(f"grad_x of column_linear {case}", column.grad_x)
        _, scatter = run("linear_reduce_scatter", case)
        oracle.check_same_on_all_ranks(f"grad_bias of linear_reduce_scatter {case}", scatter.grad_biases[0])


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_replicated_results_are_bitwise_equal_on_all_ranks(world_size: int) -> None:
    """Catches ranks that sum in their own order: replicas drift apart, and greedy decoding diverges."""
    run_distributed(world_size, compare_ranks)


def skewed(rank: int, world_size: int) -> list[str]:
    """Shards that torch.chunk would not make: any length, but then the total must not be claimed to be chunks."""
    sizes = [1, 4, 0, 2][:world_size]
    generator = torch.Generator().manual_seed(8)
    answers = []
    for dtype, lead in itertools.product((torch.float32, torch.bfloat16, torch.float64), ((), (3,))):
        xs = [oracle.integers((size, *lead, 8), dtype, generator) for size in sizes]
        ws = [oracle.integers((5, 8), dtype, generator) for _ in sizes]
        gs = [oracle.integers((sum(sizes), *lead, 5), dtype, generator) for _ in sizes]
        x, weight = xs[rank].clone().requires_grad_(), ws[rank].clone().requires_grad_()
        out = interlace.functional.all_gather_linear(x, weight, group=None)
        grad_x, grad_weight = torch.autograd.grad(out, [x, weight], gs[rank])
        whole = torch.cat(xs).double()
        oracle.check_equal("out", out, whole @ ws[rank].double().t())
        summed = sum(g.double() @ w.double() for g, w in zip(gs, ws, strict=True))
        oracle.check_equal("grad_x", grad_x, summed[sum(sizes[:rank]) : sum(sizes[: rank + 1])])
        oracle.check_equal(
            "grad_weight", grad_weight, gs[rank].double().flatten(0, -2).t() @ whole.flatten(0, -2)
        )
        try:
            interlace.functional.all_gather_linear(x, weight, group=None, gather_size=sum(sizes))
        except (ValueError, interlace.CollectiveAborted) as error:
            answers.append(str(error))
        out = interlace.functional.all_reduce(torch.ones(3), group=None)
        oracle.check_equal("all_reduce after the refusal", out, torch.full((3,), float(world_size)))
    return answers


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_shards_of_any_length_are_gathered_and_their_gradients_scattered_back(world_size: int) -> None:
    """Catches rows that are dropped or counted twice, or an accepted total that cuts elsewhere than the shards."""
    for answers in run_distributed(world_size, skewed):
        assert len(answers) == 6 and all("gather_size" in answer for answer in answers), answers


def changed_weights(rank: int, world_size: int) -> None:
    x, weight = torch.ones(4, 64), torch.ones(48, 64)
    with torch.no_grad():
        for turn in range(1, 4):
            weight.fill_(float(turn))  # as an optimizer, load_state_dict or an adapter's merge does it
            expected = torch.full((4, 48), 64.0 * turn * world_size)
            oracle.check_equal(
                f"turn {turn}", interlace.functional.linear_all_reduce(x, weight, group=None), expected
            )
        for turn in range(1, 6):
            fresh = torch.full((48, 64), float(turn))  # very likely at the address of the last one
            expected = torch.full((4, 48), 64.0 * turn * world_size)
            oracle.check_equal(
                f"fresh {turn}", interlace.functional.linear_all_reduce(x, fresh, group=None), expected
            )
            del fresh


def test_a_changed_weight_is_seen_at_once() -> None:
    """Catches a cache of packed weights keyed by address."""
    run_distributed(2, changed_weights)


def bias_only(rank: int, world_size: int) -> None:
    x, weight, bias = torch.randn(5, 4), torch.zeros(3, 4), torch.ones(3, requires_grad=True)
    out = interlace.functional.linear_all_reduce(x, weight, bias, group=None)
    oracle.check_equal("out of linear_all_reduce", out, torch.ones(5, 3))
    out = interlace.functional.linear_reduce_scatter(x, weight, bias, group=None)
    rows = oracle.chunk_sizes(5, world_size)[rank]
    oracle.check_equal("out of linear_reduce_scatter", out, torch.ones(rows, 3))
    (grad,) = torch.autograd.grad(out, bias, torch.full((rows, 3), rank + 1.0))
    total = sum((r + 1.0) * size for r, size in enumerate(oracle.chunk_sizes(5, world_size)))
    oracle.check_equal("grad_bias of linear_reduce_scatter", grad, torch.full((3,), total))


@pytest.mark.parametrize("world_size", WORLDS)
def test_bias_is_added_once_and_its_gradient_is_the_full_sum(world_size: int) -> None:
    """Catches a bias added on every rank, and a gradient of the local rows only."""
    run_distributed(world_size, bias_only)
