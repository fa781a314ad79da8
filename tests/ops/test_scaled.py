"""fp8 products with their scales: against fp64 of the dequantised tensors, which fp32 reaches up to its rounding."""

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
FP8 = torch.float8_e4m3fn
Cut = Callable[[Tensor], Tensor]


def quantised(shape: tuple[int, ...], generator: torch.Generator, by_row: bool) -> tuple[Tensor, Tensor]:
    """(e4m3 values, scale): one element, or one a row [.., 1]."""
    value = torch.randn(shape, generator=generator)
    largest = value.abs().amax(-1, keepdim=True) if by_row else value.abs().amax().reshape(1)
    scale = (largest / 448).clamp(min=1e-12)  # 448: the largest finite e4m3 number
    return (value / scale).to(FP8), scale


def close(what: str, ours: Tensor, terms: list[tuple[Tensor, ...]], bias: Tensor | None, cut: Cut) -> None:
    """Ours against fp64. The bound is the error of one fp32 product of the dequantised tensors side by side."""

    def whole(dtype: torch.dtype) -> Tensor:
        x = torch.cat([x.to(dtype) * x_scale.to(dtype) for x, x_scale, _, _ in terms], -1)
        weight = torch.cat([w.to(dtype) * w_scale.to(dtype) for _, _, w, w_scale in terms], -1)
        return cut(torch.nn.functional.linear(x, weight, None if bias is None else bias.to(dtype)))

    oracle.check_close(what, ours, whole(torch.float64), whole(torch.float32).to(ours.dtype))


def check_gather(rank: int, world_size: int, by_row: bool, out_dtype: torch.dtype, dim: int) -> None:
    generator = torch.Generator().manual_seed(21)
    sizes = oracle.chunk_sizes(7, world_size)
    shards = []
    for size in sizes:
        shape = (size, 3, 24) if dim == 0 else (3, size, 24)
        # a scale of its own for every rank
        shards.append(
            quantised(shape, generator, by_row) if size else (torch.zeros(shape).to(FP8), torch.ones(1))
        )
    weights = [quantised((n, 24), generator, by_row) for n in (5, 9)]
    biases = [torch.randn(5, generator=generator).to(out_dtype), None]
    shards = [(x, s if s.numel() > 1 or not by_row else s.expand(*x.shape[:-1], 1)) for x, s in shards]
    x, scale = shards[rank]
    outs = il.all_gather_linear_scaled(
        x, scale, [w for w, _ in weights], [s for _, s in weights], biases, group=None, gather_dim=dim,
        gather_size=7, out_dtype=out_dtype,
    )  # fmt: skip
    whole = torch.cat([x for x, _ in shards], dim)
    scales = torch.cat([s.expand(*x.shape[:-1], 1) for x, s in shards], dim)
    for i, (out, (weight, weight_scale), bias) in enumerate(zip(outs, weights, biases, strict=True)):
        assert out.dtype is out_dtype
        terms = [(whole, scales, weight, weight_scale)]
        close(f"gather {by_row} {out_dtype} {i}", out, terms, bias, lambda t: t)


def check_scatter(rank: int, world_size: int, by_row: bool, out_dtype: torch.dtype, dim: int) -> None:
    generator = torch.Generator().manual_seed(22)
    shape = (7, 3) if dim == 0 else (3, 7)
    parts = [
        (quantised((*shape, 24), generator, by_row), quantised((10, 24), generator, by_row))
        for _ in range(world_size)
    ]
    bias = torch.randn(10, generator=generator).to(out_dtype)
    (x, x_scale), (weight, weight_scale) = parts[rank]
    out = il.linear_reduce_scatter_scaled(
        x, x_scale, weight, weight_scale, bias, group=None, scatter_dim=dim, out_dtype=out_dtype
    )
    terms = [(*x, *w) for x, w in parts]
    rounded = interlace.last_path().algorithm == "decomposed" and out_dtype is torch.bfloat16
    if not rounded:
        close("scatter", out, terms, bias, lambda t: oracle.chunk(t, dim, rank, world_size))
        return
    # partial sums of peers travel in bf16: 1.41 times the error of one rounding, see _wire of the module
    value = (
        sum(x.double() * s.double() @ (w.double() * t.double()).t() for x, s, w, t in terms) + bias.double()
    )
    mine = oracle.chunk(value, dim, rank, world_size)
    oracle.check_close("scatter in bf16", out, mine, mine.to(out_dtype))


def every_case(rank: int, world_size: int) -> list[str]:
    ops = []
    for choice in ("auto", "decomposed", "reference"):
        with interlace.backend(choice):
            for by_row in (False, True):
                for out_dtype in (torch.bfloat16, torch.float16, torch.float32):
                    for dim in (0, 1) if choice == "auto" else (1,):
                        check_gather(rank, world_size, by_row, out_dtype, dim)
                        ops.append(interlace.last_path().op)
                        check_scatter(rank, world_size, by_row, out_dtype, dim)
                        ops.append(interlace.last_path().op)
    return sorted(set(ops))


@pytest.mark.parametrize("world_size", WORLDS)
def test_scaled_ops_equal_the_product_of_the_dequantised_tensors(world_size: int) -> None:
    """Catches scales of another rank's rows, a scale that is divided by, a bias that is scaled."""
    for ops in run_distributed(world_size, every_case):
        if world_size > 1:
            assert ops == ["all_gather_gemm_scaled", "gemm_reduce_scatter_scaled"]


def mistakes(rank: int, world_size: int) -> list[str]:
    generator = torch.Generator().manual_seed(23)
    x, scale = quantised((4, 16), generator, True)
    weight, weight_scale = quantised((6, 16), generator, True)
    gather, scatter = il.all_gather_linear_scaled, il.linear_reduce_scatter_scaled
    calls: list[Callable[[], Any]] = [
        lambda: gather(x.float(), scale, weight, weight_scale, group=None),
        lambda: gather(x, scale[:3], weight, weight_scale, group=None),
        lambda: gather(x, scale.double(), weight, weight_scale, group=None),
        lambda: gather(x, scale, [weight], [weight_scale, weight_scale], group=None),
        lambda: gather(x, scale, weight, weight_scale, torch.ones(6), group=None),
        lambda: gather(x, scale, weight, weight_scale, group=None, gather_dim=1),
        lambda: scatter(x, scale, weight, weight_scale, group=None, scatter_dim=-1),
        lambda: scatter(x, scale, weight, weight_scale, group=None, out_dtype=FP8),
        lambda: scatter(x, scale, weight[:, :8], weight_scale, group=None),
        lambda: scatter(x, scale.requires_grad_(), weight, weight_scale, group=None),
    ]
    texts = []
    for call in calls:
        try:
            call()
            texts.append("accepted")
        except (ValueError, TypeError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        out = scatter(x, scale.detach(), weight, weight_scale, group=None, out_dtype=torch.float32)
    terms = [(x, scale.detach(), weight, weight_scale)] * world_size
    close("autocast does not touch it", out, terms, None, lambda t: oracle.chunk(t, 0, rank, world_size))
    dist.barrier()
    return texts


def test_scaled_ops_refuse_what_does_not_fit() -> None:
    """Catches scales that broadcast along the wrong dim, and gradients that vanish in silence."""
    parts = (
        "expected float8_e4m3fn",
        "has 3 elements; expected 1, or 4",
        "expected float32",
        "1 weights, 2 weight scales",
        "expected a bias [6] in torch.bfloat16",
        "gather_dim=1 is the inner dim",
        "scatter_dim=-1 is the dim of columns",
        "out_dtype=torch.float8_e4m3fn",
        "needs a weight [N, 16], got [6, 8]",
        "forward only",
    )
    for texts in run_distributed(2, mistakes):
        for text, part in zip(texts, parts, strict=True):
            assert part in text and text.startswith(("ValueError: ", "TypeError: ")), text
