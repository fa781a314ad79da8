"""Row-parallel products with residual and RMSNorm: values and all gradients against the unsharded layer in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import interlace
import interlace.functional as il
from tests import oracle
from tests.distributed import run_distributed

WORLDS = (1, 2, 3, 4)
EPS = 1e-5
DTYPES = (torch.bfloat16, torch.float16, torch.float64)
NAMES = ("x", "weight", "bias", "residual", "norm_weight")
# shape of x without K, K, N, dim that is scattered
SHAPES = (((7,), 48, 130, 0), ((2, 5, 3), 40, 96, 1), ((33,), 64, 24, 0), ((1,), 64, 256, -2))


def unsharded(leaves: list[Tensor | None], dtype: torch.dtype) -> tuple[list[Tensor | None], Tensor, Tensor]:
    """The layer in plain torch: (leaves, normalised, total)."""
    copies = [None if t is None else t.detach().to(dtype).requires_grad_() for t in leaves]
    x, weight, bias, residual, norm_weight = copies
    total = torch.nn.functional.linear(x, weight, bias)
    total = total if residual is None else total + residual
    return copies, torch.nn.functional.rms_norm(total, total.shape[-1:], norm_weight, EPS), total


def whole_tensors(
    lead: tuple[int, ...], k: int, n: int, dtype: torch.dtype, optional: bool
) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(11)

    def make(*shape: int) -> Tensor:
        return oracle.normals(shape, dtype, generator)

    bias, residual = (make(n), make(*lead, n)) if optional else (None, None)
    return [make(*lead, k), make(n, k), bias, residual, 1 + make(n) / 4]


def gradients(
    outs: tuple[Tensor, Tensor], leaves: list[Tensor | None], grads: list[Tensor]
) -> dict[str, Tensor]:
    given = [(name, leaf) for name, leaf in zip(NAMES, leaves, strict=True) if leaf is not None]
    found = torch.autograd.grad(outs, [leaf for _, leaf in given], grads)
    return {name: grad for (name, _), grad in zip(given, found, strict=True)}


def check_one(
    rank: int, world_size: int, shape: tuple[Any, ...], dtype: torch.dtype, scatter: bool, optional: bool
) -> bool:
    """One call forward and backward; this rank's share of everything must be the unsharded layer's. Was it fused?"""
    lead, k, n, dim = shape
    whole = whole_tensors(lead, k, n, dtype, optional)
    generator = torch.Generator().manual_seed(12)
    whole_grads = [oracle.normals((*lead, n), dtype, generator) for _ in range(2)]
    at = dim % (len(lead) + 1)
    columns = oracle.split_sizes(k, world_size)
    own = slice(sum(columns[:rank]), sum(columns[: rank + 1]))

    def mine(t: Tensor) -> Tensor:
        return oracle.chunk(t, at, rank, world_size) if scatter else t

    def shares(results: tuple[Any, ...], grads: list[Tensor]) -> dict[str, Tensor]:
        leaves, normalised, total = results
        found = gradients((normalised, total), leaves, grads)
        cut: dict[str, Callable[[Tensor], Tensor]] = {
            "x": lambda g: g[..., own], "weight": lambda g: g[:, own], "residual": mine,
        }  # fmt: skip
        named = {name: cut.get(name, lambda g: g)(grad) for name, grad in found.items()}
        return {"normalised": mine(normalised), "total": mine(total), **named}

    exact = shares(unsharded(whole, torch.float64), [g.double() for g in whole_grads])
    same = shares(unsharded(whole, dtype), whole_grads)
    x, weight, bias, residual, norm_weight = whole
    local = [x[..., own], weight[:, own], bias, None if residual is None else mine(residual), norm_weight]
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in local]
    if scatter:
        outs = il.linear_reduce_scatter_norm(*leaves, EPS, group=None, scatter_dim=dim)
    else:
        outs = il.linear_all_reduce_norm(*leaves, EPS, group=None)
    fused = interlace.last_path().fused
    ours = {"normalised": outs[0], "total": outs[1]}
    ours.update(gradients(outs, leaves, [mine(g) for g in whole_grads]))
    for part, value in ours.items():
        what = f"{shape} {dtype} scatter={scatter}: {part}"
        oracle.check_close(what, value.detach(), exact[part].detach(), same[part].detach())
    return fused


def every_case(rank: int, world_size: int) -> list[str]:
    """Everything by the fused path, one shape and bf16 by the two others; "backend: fused?" of each."""
    seen = set()
    for choice in ("auto", "decomposed", "reference"):
        shapes = SHAPES if choice == "auto" else SHAPES[1:2]
        dtypes = DTYPES if choice == "auto" else DTYPES[:1]
        cases = [(shape, torch.float32) for shape in shapes] + [(SHAPES[2], dtype) for dtype in dtypes]
        with interlace.backend(choice):
            for shape, dtype in cases:
                for scatter in (False, True):
                    fused = check_one(rank, world_size, shape, dtype, scatter, shape is not SHAPES[0])
                    seen.add(f"{choice}: {fused}")
    return sorted(seen)


@pytest.mark.parametrize("world_size", WORLDS)
def test_norm_ops_equal_the_unsharded_layer(world_size: int) -> None:
    """Catches a bias or residual added once a rank, a norm of partial sums, a gradient of the wrong rows."""
    for algorithms in run_distributed(world_size, every_case):
        if world_size > 1:
            assert algorithms == ["auto: True", "decomposed: False", "reference: False"]


def paths_and_parts(rank: int, world_size: int) -> list[str]:
    """Names of paths, partial use of the outputs, frozen parts, and one residual for a chain of two blocks."""
    x, weight = torch.randn(6, 8), torch.randn(5, 8, requires_grad=True)
    norm_weight = torch.ones(5)
    names = []
    for function in (il.linear_all_reduce_norm, il.linear_reduce_scatter_norm):
        normalised, total = function(x, weight, None, None, norm_weight, group=None)
        names.append(interlace.last_path().op)
        (only_total,) = torch.autograd.grad(total.sum(), weight, retain_graph=True)
        (only_normalised,) = torch.autograd.grad(normalised.sum(), weight, retain_graph=True)
        (both,) = torch.autograd.grad(normalised.sum() + total.sum(), weight)
        torch.testing.assert_close(both, only_total + only_normalised)
        with torch.no_grad():
            frozen = function(x, weight, None, None, norm_weight, group=None)
        oracle.check_bitwise("without gradients", frozen, (normalised.detach(), total.detach()))
    with torch.autocast("cpu", torch.bfloat16):
        normalised, total = il.linear_all_reduce_norm(x, weight, None, None, norm_weight, group=None)
    assert (normalised.dtype, total.dtype) == (torch.bfloat16, torch.bfloat16)
    return names


def test_norm_ops_tell_their_paths_and_give_partial_gradients() -> None:
    """Catches a gradient that needs both outputs, and the name of the op inside instead of the op outside."""
    assert run_distributed(2, paths_and_parts) == [["gemm_all_reduce_norm", "gemm_reduce_scatter_norm"]] * 2


def mistakes(rank: int, world_size: int) -> list[str]:
    x, weight, norm_weight = torch.ones(4, 8), torch.ones(6, 8), torch.ones(6)
    calls: list[Callable[[], Any]] = [
        lambda: il.linear_all_reduce_norm(x, weight, None, torch.ones(3, 6), norm_weight, group=None),
        lambda: il.linear_all_reduce_norm(x, weight, None, None, torch.ones(5), group=None),
        lambda: il.linear_all_reduce_norm(x, weight, None, None, norm_weight.double(), group=None),
        lambda: il.linear_reduce_scatter_norm(x, weight, None, None, norm_weight, group=None, scatter_dim=-1),
        lambda: il.linear_reduce_scatter_norm(x, weight, None, torch.ones(4, 6), norm_weight, group=None),
    ]
    texts = []
    for call in calls:
        try:
            call()
            texts.append("accepted")
        except (ValueError, TypeError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    oracle.check_equal("the group still works", il.all_reduce(torch.ones(2), group=None), 2 * torch.ones(2))
    dist.barrier()
    return texts


def test_norm_ops_refuse_what_does_not_fit() -> None:
    """Catches a residual of the whole where a part belongs, broadcast in silence."""
    expected = (
        "ValueError: linear_all_reduce_norm: expected a residual [4, 6], got [3, 6]",
        "ValueError: linear_all_reduce_norm: expected a norm_weight [6], got [5]",
        "TypeError: linear_all_reduce_norm: x is torch.float32, norm_weight is torch.float64",
        "ValueError: linear_reduce_scatter_norm: scatter_dim=-1 is the normalised dim",
        "ValueError: linear_reduce_scatter_norm: expected a residual [2, 6], got [4, 6]",
    )
    for texts in run_distributed(2, mistakes):
        for text, start in zip(texts, expected, strict=True):
            assert text.startswith(start), text
