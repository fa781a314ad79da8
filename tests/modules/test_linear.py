"""Column and row linears against the unsharded layer: outputs and all gradients, worlds 1 to 4."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from interlace.modules import ColumnParallelLinear, RowParallelLinear
from tests import oracle
from tests.distributed import run_distributed

WORLDS = (1, 2, 3, 4)
DTYPES = (torch.float64, torch.bfloat16, torch.float32)
SIZES = [(7, 5), (16, 12), (3, 1), (1, 3), (33, 64)]
LEADS = [(), (3,), (5, 4), (2, 7, 3), (2, 1, 6, 2), (0, 4)]


def _layer(k: int, n: int, bias: bool, dtype: torch.dtype, seed: int) -> nn.Linear:
    """Whole numbers in fp32 and bf16, so that these are compared with ==; any numbers in fp64."""
    generator = torch.Generator().manual_seed(seed)
    linear = nn.Linear(k, n, bias=bias, dtype=dtype)
    for param in linear.parameters():
        param.data.copy_(_numbers(param.shape, dtype, generator))
    return linear


def _numbers(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    make = oracle.normals if dtype == torch.float64 else oracle.integers
    return make(shape, dtype, generator)


def _tensors(lead: tuple[int, ...], k: int, n: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return _numbers((*lead, k), dtype, generator), _numbers((*lead, n), dtype, generator)


def _expected(linear: nn.Linear, x: Tensor, grad: Tensor) -> oracle.Linear:
    bias = None if linear.bias is None else linear.bias.detach()
    return oracle.unsharded_linear(x, linear.weight.detach(), bias, grad, torch.float64)


def _check(what: str, found: list[Tensor | None], expected: list[Tensor | None], dtype: torch.dtype) -> None:
    for name, ours, want in zip(("out", "grad_x", "grad_weight", "grad_bias"), found, expected, strict=True):
        assert (ours is None) == (want is None), f"{what}: {name}"
        if ours is None:
            continue
        assert ours.dtype == dtype, f"{what}: {name} is {ours.dtype}"
        if dtype == torch.float64:
            oracle.check_close(f"{what}: {name}", ours, want, want)
        else:
            oracle.check_equal(f"{what}: {name}", ours, want)


def _column(rank: int, world_size: int) -> None:
    cases = itertools.product(SIZES, LEADS, (True, False), (True, False), (False, True))
    for seed, ((k, n), lead, bias, gather_output, sequence) in enumerate(cases):
        dtype = DTYPES[seed // 2 % 3]
        if sequence and not lead:
            continue
        what = f"column {k}->{n} {lead} bias={bias} gather={gather_output} sequence={sequence} {dtype}"
        linear = _layer(k, n, bias, dtype, seed)
        x, grad = _tensors(lead, k, n, dtype, seed)
        exact = _expected(linear, x, grad)
        ours = ColumnParallelLinear.from_linear(
            linear, None, gather_output=gather_output, sequence_parallel=sequence
        )
        local = oracle.chunk(x, -2, rank, world_size) if sequence else x
        local = local.clone().requires_grad_()
        out = ours(local, gather_size=x.shape[-2]) if sequence else ours(local)
        own = [oracle.chunk(grad, -1, rank, world_size), grad][gather_output]
        out.backward(own.contiguous())

        expected = [
            exact.out if gather_output else oracle.chunk(exact.out, -1, rank, world_size),
            oracle.chunk(exact.grad_x, -2, rank, world_size) if sequence else exact.grad_x,
            oracle.chunk(exact.grad_weight, 0, rank, world_size),
            None if exact.grad_bias is None else oracle.chunk(exact.grad_bias, 0, rank, world_size),
        ]
        bias_grad = None if ours.bias is None else ours.bias.grad
        _check(what, [out, local.grad, ours.weight.grad, bias_grad], expected, dtype)


def _row(rank: int, world_size: int) -> None:
    cases = itertools.product(SIZES, LEADS, (True, False), (True, False), (False, True))
    for seed, ((k, n), lead, bias, parallel, sequence) in enumerate(cases):
        dtype = DTYPES[seed // 2 % 3]
        if sequence and not lead:
            continue
        what = f"row {k}->{n} {lead} bias={bias} input_is_parallel={parallel} sequence={sequence} {dtype}"
        linear = _layer(k, n, bias, dtype, seed)
        x, grad = _tensors(lead, k, n, dtype, seed)
        exact = _expected(linear, x, grad)
        ours = RowParallelLinear.from_linear(
            linear, None, input_is_parallel=parallel, sequence_parallel=sequence
        )
        local = (oracle.chunk(x, -1, rank, world_size) if parallel else x).clone().requires_grad_()
        out = ours(local)
        out.backward((oracle.chunk(grad, -2, rank, world_size) if sequence else grad).contiguous())

        expected = [
            oracle.chunk(exact.out, -2, rank, world_size) if sequence else exact.out,
            oracle.chunk(exact.grad_x, -1, rank, world_size) if parallel else exact.grad_x,
            oracle.chunk(exact.grad_weight, 1, rank, world_size),
            exact.grad_bias,
        ]

        bias_grad = None if ours.bias is None else ours.bias.grad
        _check(what, [out, local.grad, ours.weight.grad, bias_grad], expected, dtype)


@pytest.mark.parametrize("world_size", WORLDS)
def test_column_linear_is_the_unsharded_one(world_size: int) -> None:
    """1-D to 4-D inputs, no rows, features that do not divide or are fewer than ranks, with and without gathering."""
    run_distributed(world_size, _column)


@pytest.mark.parametrize("world_size", WORLDS)
def test_row_linear_is_the_unsharded_one(world_size: int) -> None:
    """Rank-equal data would hide a missing sum: every rank has its own columns of random data."""
    run_distributed(world_size, _row)


def _shard_sizes(rank: int, world_size: int) -> None:
    sizes = {2: (5, 2), 3: (0, 6, 1), 4: (1, 0, 4, 2)}[world_size]
    linear = _layer(7, 7, True, torch.float64, 1)
    x, grad = _tensors((3, 2), 7, 7, torch.float64, 2)
    exact = oracle.unsharded_linear(x, linear.weight.detach(), linear.bias.detach(), grad, torch.float64)
    start = sum(sizes[:rank])
    mine = slice(start, start + sizes[rank])
    column = ColumnParallelLinear.from_linear(linear, None, shard_sizes=sizes, gather_output=True)
    local = x.clone().requires_grad_()
    column(local).backward(grad)
    torch.testing.assert_close(column(x), exact.out)
    torch.testing.assert_close(local.grad, exact.grad_x)
    torch.testing.assert_close(column.weight.grad, exact.grad_weight[mine])
    torch.testing.assert_close(column.bias.grad, exact.grad_bias[mine])
    row = RowParallelLinear.from_linear(linear, None, shard_sizes=sizes, input_is_parallel=False)
    local = x.clone().requires_grad_()
    row(local).backward(grad)
    torch.testing.assert_close(row(x), exact.out)
    torch.testing.assert_close(local.grad, exact.grad_x)
    torch.testing.assert_close(row.weight.grad, exact.grad_weight[:, mine])
    torch.testing.assert_close(row.bias.grad, exact.grad_bias)
    torch.testing.assert_close(row(x[..., mine]) if row.input_is_parallel else row(x), exact.out)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_explicit_shard_sizes_are_gathered_and_scattered_right(world_size: int) -> None:
    """Sizes by heads are not torch.chunk's: a gather that assumes those returns features of other ranks."""
    run_distributed(world_size, _shard_sizes)


def _bias_once(rank: int, world_size: int) -> None:
    for sequence in (False, True):
        row = RowParallelLinear(4, 3, sequence_parallel=sequence)
        with torch.no_grad():
            row.weight.zero_()
            row.bias.fill_(1)
        x = torch.randn(2, 6, row.local_in_features)
        out = row(x)
        assert torch.equal(out, torch.ones_like(out)), f"sequence_parallel={sequence}: {out}"
        out.sum().backward()
        assert torch.equal(row.bias.grad, torch.full((3,), 12.0)), (
            f"sequence_parallel={sequence}: {row.bias.grad}"
        )


@pytest.mark.parametrize("world_size", WORLDS)
def test_row_bias_is_added_once_and_its_gradient_is_the_full_sum(world_size: int) -> None:
    """Added per rank it would be world_size; under sequence parallel an unsummed gradient would be 12 / world_size."""
    run_distributed(world_size, _bias_once)


def _return_bias(rank: int, world_size: int) -> None:
    linear = _layer(7, 5, True, torch.float64, 3)
    x, grad = _tensors((4, 3), 7, 5, torch.float64, 4)
    exact = oracle.unsharded_linear(x, linear.weight.detach(), linear.bias.detach(), grad, torch.float64)
    for gather in (False, True):
        column = ColumnParallelLinear.from_linear(linear, None, return_bias=True, gather_output=gather)
        out, bias = column(x)
        (out + bias).backward(grad if gather else oracle.chunk(grad, -1, rank, world_size))
        torch.testing.assert_close(
            out + bias, exact.out if gather else oracle.chunk(exact.out, -1, rank, world_size)
        )
        torch.testing.assert_close(column.bias.grad, oracle.chunk(exact.grad_bias, 0, rank, world_size))
    for sequence in (False, True):
        row = RowParallelLinear.from_linear(linear, None, return_bias=True, sequence_parallel=sequence)
        out, bias = row(oracle.chunk(x, -1, rank, world_size))
        cut = (lambda t: oracle.chunk(t, -2, rank, world_size)) if sequence else (lambda t: t)
        (out + bias).backward(cut(grad))
        torch.testing.assert_close(out + bias, cut(exact.out))
        torch.testing.assert_close(row.bias.grad, exact.grad_bias)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_returned_bias_has_the_gradient_of_the_added_one(world_size: int) -> None:
    """Added by the caller to a part of the sequence, its gradient there is a part of the sum."""
    run_distributed(world_size, _return_bias)


def _layouts(rank: int, world_size: int) -> None:
    linear = _layer(7, 5, True, torch.float64, 5)
    x, grad = _tensors((4, 6), 7, 5, torch.float64, 6)
    for name, layout in oracle.LAYOUTS.items():
        x_laid, grad_laid = layout(x), layout(grad)
        exact = oracle.unsharded_linear(
            x_laid, linear.weight.detach(), linear.bias.detach(), grad_laid, torch.float64
        )
        for sequence in (False, True):
            column = ColumnParallelLinear.from_linear(linear, None, sequence_parallel=sequence)
            row = RowParallelLinear.from_linear(linear, None, sequence_parallel=sequence)
            cut = (lambda t: oracle.chunk(t, -2, rank, world_size)) if sequence else (lambda t: t)
            leaf = cut(x_laid).detach().requires_grad_()
            out = column(leaf, gather_size=6) if sequence else column(leaf)
            out.backward(
                layout(oracle.chunk(grad_laid, -1, rank, world_size))
                if name != "expanded"
                else oracle.chunk(grad_laid, -1, rank, world_size)
            )
            torch.testing.assert_close(leaf.grad, cut(exact.grad_x), msg=lambda m, n=name: f"column {n}: {m}")
            torch.testing.assert_close(
                column.weight.grad, oracle.chunk(exact.grad_weight, 0, rank, world_size)
            )
            leaf = oracle.chunk(x_laid, -1, rank, world_size).detach().requires_grad_()
            out = row(leaf)
            torch.testing.assert_close(out, cut(exact.out))
            out.backward(cut(grad_laid))
            torch.testing.assert_close(leaf.grad, oracle.chunk(exact.grad_x, -1, rank, world_size))
            torch.testing.assert_close(row.weight.grad, oracle.chunk(exact.grad_weight, 1, rank, world_size))


@pytest.mark.parametrize("world_size", [2, 3])
def test_no_stride_of_input_or_gradient_is_read_as_contiguous(world_size: int) -> None:
    """Transposed, sliced out of NaN, every other row, expanded, offset, stride 0: the layouts that bit others."""
    run_distributed(world_size, _layouts)


def _sequence_first(rank: int, world_size: int) -> None:
    first, second = _layer(7, 9, True, torch.float64, 7), _layer(9, 4, True, torch.float64, 8)
    x, grad = _tensors((5, 3), 7, 4, torch.float64, 9)
    whole = x.clone().requires_grad_()
    expected = second(first(whole))
    expected.backward(grad)
    for dim in (0, -3):
        options = {"sequence_parallel": True, "sequence_dim": dim}
        column = ColumnParallelLinear.from_linear(first, None, **options)
        row = RowParallelLinear.from_linear(second, None, **options)
        local = oracle.chunk(x, 0, rank, world_size).clone().requires_grad_()
        out = row(column(local, gather_size=5))
        out.backward(oracle.chunk(grad, 0, rank, world_size))
        torch.testing.assert_close(out, oracle.chunk(expected.detach(), 0, rank, world_size))
        torch.testing.assert_close(local.grad, oracle.chunk(whole.grad, 0, rank, world_size))
        torch.testing.assert_close(row.bias.grad, second.bias.grad)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_sequence_may_be_the_first_dim(world_size: int) -> None:
    """[sequence, batch, features]: with the default dim the batch would be cut."""
    run_distributed(world_size, _sequence_first)
