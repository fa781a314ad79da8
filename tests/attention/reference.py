"""Attention written out over the whole sequence, in the dtype asked for: the oracle of the context-parallel ops."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from interlace.functional.attention import spans_of


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem: sizes of the whole sequence, and the mask."""

    heads: int = 4
    kv_heads: int = 4
    tokens: int = 48
    width: int = 16
    batch: int = 2
    causal: bool = True
    window: int | None = None
    cu_seqlens: tuple[int, ...] | None = None
    factor: float = 1.0  # of the logits
    dtype: torch.dtype = torch.float64

    def draw(self, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and the gradient of the output, the same on all ranks."""
        generator = torch.Generator().manual_seed(seed)
        shapes = [
            (self.batch, h, self.tokens, self.width)
            for h in (self.heads, self.kv_heads, self.kv_heads, self.heads)
        ]
        q, k, v, grad = (torch.randn(shape, generator=generator).to(self.dtype) for shape in shapes)
        return q * self.factor, k, v, grad

    def mask(self) -> Tensor:
        """Which query sees which key, [tokens, tokens]."""
        i = torch.arange(self.tokens).unsqueeze(1)
        j = torch.arange(self.tokens).unsqueeze(0)
        seen = torch.ones(self.tokens, self.tokens, dtype=torch.bool)
        if self.causal:
            seen &= j <= i
        if self.window is not None:
            seen &= j > i - self.window
        if self.cu_seqlens is not None:
            ends = torch.tensor(self.cu_seqlens[1:])
            document = torch.searchsorted(ends, torch.arange(self.tokens), right=True)
            seen &= document.unsqueeze(1) == document.unsqueeze(0)
        return seen


@dataclasses.dataclass(frozen=True)
class Result:
    """Output, log-sum-exp of the scores, and gradients, over the whole sequence."""

    out: Tensor
    lse: Tensor
    grads: tuple[Tensor, Tensor, Tensor]


def attention(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, mask: Tensor, dtype: torch.dtype) -> Result:
    """softmax(Q K^T / sqrt(D)) V by plain products in `dtype`."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
    readers = q.shape[1] // k.shape[1]
    keys, values = (t.repeat_interleave(readers, 1) for t in leaves[1:])
    scores = (leaves[0] @ keys.transpose(-1, -2)) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~mask, float("-inf"))
    out = scores.softmax(-1) @ values
    grads = torch.autograd.grad(out, leaves, grad.to(dtype))
    return Result(
        out.detach(),
        scores.detach().float().logsumexp(-1) if dtype != torch.float64 else scores.detach().logsumexp(-1),
        grads,
    )


def held(layout: str, case: Case, world_size: int, rank: int) -> Tensor:
    """Positions of the tokens of a rank, in the order in which it holds them."""
    spans = spans_of(layout, case.tokens, world_size, rank, case.cu_seqlens)
    return torch.cat([torch.arange(s.start, s.start + s.length * s.step, s.step) for s in spans])
