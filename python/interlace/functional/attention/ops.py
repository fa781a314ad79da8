"""The ops behind context-parallel attention: `interlace::context_attention` and its backward, fakes and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import translated
from ...groups import GroupInfo, resolve
from .._check import autocast, peers_told, refuse
from .exchange import exchange_of
from .kernels import Accumulator, Gradients
from .problem import Problem, agree, problem_of

__all__ = ["context_attention"]

ALONE = GroupInfo(name="", rank=0, world_size=1)
_ARGUMENTS = (
    "str op, str algorithm, bool causal, float? scale, str layout, int? window, int[]? cu_seqlens, int inside, "
    "str group_name"
)
_LIB = torch.library.Library("interlace", "FRAGMENT")
_LIB.define(f"context_attention(Tensor q, Tensor k, Tensor v, {_ARGUMENTS}) -> (Tensor, Tensor)")
_LIB.define(
    "context_attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_ARGUMENTS}) -> (Tensor, Tensor, Tensor)"
)


def context_attention(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """q [B, Hq, S/R, D], k, v [B, Hkv, S/R, D] -> out as q, log-sum-exp [B, Hq, S/R] in fp32; see the op's schema."""
    q, k, v = autocast(q, k, v)  # type: ignore[assignment]
    try:
        return torch.ops.interlace.context_attention(q, k, v, *arguments)
    except RuntimeError as error:
        raise translated(error) from None


def _wide(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _problem(
    q: Tensor, k: Tensor, v: Tensor, op: str, algorithm: str, causal: bool, scale: float | None, layout: str,
    window: int | None, cu_seqlens: Sequence[int] | None, inside: int, group_name: str,
) -> tuple[Problem, GroupInfo]:  # fmt: skip
    info = resolve(group_name) if group_name else ALONE
    try:
        problem = problem_of(
            op, q, k, v, info.world_size, causal=causal, scale=scale, layout=layout, window=window,
            cu_seqlens=cu_seqlens, inside=inside,
        )  # fmt: skip
    except (ValueError, TypeError) as error:
        refuse(info, type(error), str(error))
    return problem, info


def _forward(q: Tensor, k: Tensor, v: Tensor, op: str, algorithm: str, *rest: Any) -> tuple[Tensor, Tensor]:
    problem, info = _problem(q, k, v, op, algorithm, *rest)
    agree(op, q, k, problem, info)
    with peers_told(info, op):
        sums = Accumulator(q, problem.scale)
        for peer, block_k, block_v in exchange_of(algorithm, problem, info, k, v, _wide(q)).blocks():
            for tile in problem.tiles(info.rank, peer):
                sums.add(tile, block_k, block_v)
        return sums.result()


def _backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    op: str,
    algorithm: str,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    problem, info = _problem(q, k, v, op, algorithm, *rest)
    agree(op, q, k, problem, info)
    with peers_told(info, op):
        sums = Gradients(grad_out, q, out, lse, problem.scale)
        exchange = exchange_of(algorithm, problem, info, k, v, lse.dtype)
        for peer, block_k, block_v, grad_k, grad_v in exchange.gradient_blocks():
            for tile in problem.tiles(info.rank, peer):
                sums.add(tile, block_k, block_v, grad_k, grad_v)
        return sums.grad_q.to(q.dtype), *exchange.gradients()


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=_wide(q))


def _fake_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.arguments = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])


def _gradient(ctx: Any, grad_out: Tensor, _grad_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    grads = torch.ops.interlace.context_attention_backward(grad_out, q, k, v, out, lse, *ctx.arguments)
    return *grads, *(None for _ in ctx.arguments)


for _name, _kernel, _fake in (
    ("context_attention", _forward, _fake_forward),
    ("context_attention_backward", _backward, _fake_backward),
):
    _LIB.impl(_name, _kernel, "CPU")
    _LIB.impl(_name, _kernel, "CUDA")
    torch.library.register_fake(f"interlace::{_name}", _fake, lib=_LIB)
torch.library.register_autograd("interlace::context_attention", _gradient, setup_context=_setup, lib=_LIB)
