"""Attention of one tile by torch's own kernels, which give the log-sum-exp along; partial results are merged by it.

Rabe and Staats, arXiv 2112.05682; Dao, arXiv 2307.08691 (backward from out and log-sum-exp alone).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import kernels_cuda, kernels_flash_attn
from .tiles import Tile

__all__ = ["Accumulator", "Gradients"]

ATEN = torch.ops.aten
_SMALLEST = 256  # queries or keys of a part: below it the kernel loses


class Accumulator:
    """Attention of queries to keys that come block by block: out [B, H, S, D] and log-sum-exp [B, H, S] in fp32.

    Queries that see no key have out 0 and log-sum-exp -inf.
    """

    def __init__(self, q: Tensor, scale: float) -> None:
        self._q, self._scale = q, scale
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        self._out = q.new_zeros(q.shape, dtype=wide)
        self._lse = q.new_full(q.shape[:-1], -math.inf, dtype=wide)
        self._started: list[tuple[int, int]] = []  # rows that hold something

    def add(self, tile: Tile, k: Tensor, v: Tensor) -> None:
        """Attend the queries of the tile to its keys; its columns count in the block k, v [B, Hkv, T, D]."""
        if not self._q.numel():
            return
        q = self._q.narrow(2, tile.row, tile.rows)
        k, v = k.narrow(2, tile.column, tile.columns), v.narrow(2, tile.column, tile.columns)
        part, part_lse = _forward(q, k, v, tile, self._scale)
        out = self._out.narrow(2, tile.row, tile.rows)
        lse = self._lse.narrow(2, tile.row, tile.rows)
        if self._untouched(tile):
            out.copy_(part)
            lse.copy_(part_lse)
            return
        total = torch.logaddexp(lse, part_lse)
        out.mul_((lse - total).exp_().unsqueeze(-1))
        out.addcmul_(part.to(out.dtype), (part_lse - total).exp_().unsqueeze(-1))
        lse.copy_(total)

    def _untouched(self, tile: Tile) -> bool:
        begin, end = tile.row, tile.row + tile.rows
        touched = any(b < end and begin < e for b, e in self._started)
        self._started.append((begin, end))
        return not touched

    def result(self) -> tuple[Tensor, Tensor]:
        """out in the dtype of q, log-sum-exp in fp32 (fp64 for fp64)."""
        return self._out.to(self._q.dtype), self._lse


class Gradients:
    """Gradients of the queries, and of the keys and values of one block after the other, in fp32 (fp64 for fp64)."""

    def __init__(self, grad_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, scale: float) -> None:
        self._grad_out, self._q, self._out, self._lse, self._scale = grad_out, q, out, lse, scale
        self.grad_q = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)

    def add(self, tile: Tile, k: Tensor, v: Tensor, grad_k: Tensor, grad_v: Tensor) -> None:
        """Add what the tile gives to `grad_q` and to grad_k, grad_v, which have the shape of the block k, v."""
        if not self._q.numel():
            return
        for part in _narrow(tile):
            rows, columns = (2, part.row, part.rows), (2, part.column, part.columns)
            grads = _backward(
                self._grad_out.narrow(*rows), self._q.narrow(*rows), k.narrow(*columns), v.narrow(*columns),
                self._out.narrow(*rows), self._lse.narrow(*rows), part, self._scale,
            )  # fmt: skip
            self.grad_q.narrow(*rows).add_(grads[0])
            grad_k.narrow(*columns).add_(grads[1])
            grad_v.narrow(*columns).add_(grads[2])
            del grads  # before the next part makes its own


def _narrow(tile: Tile) -> list[Tile]:
    """A large tile in parts: what a part gives is held once more while it is added."""
    if tile.band is not None:
        return [tile]
    rows = _halves(tile.row, tile.rows)
    columns = _halves(tile.column, tile.columns)
    parts = []
    for i, (row, height) in enumerate(rows):
        for j, (column, width) in enumerate(columns):
            if not tile.causal or j <= i:
                parts.append(Tile(row, height, column, width, causal=tile.causal and i == j))
    return parts


def _halves(begin: int, size: int) -> list[tuple[int, int]]:
    if size < 2 * _SMALLEST:
        return [(begin, size)]
    half = size // 2
    return [(begin, half), (begin + half, size - half)]


def _mask(tile: Tile, q: Tensor) -> Tensor | None:
    if tile.band is None:
        return None
    low, high = tile.band
    offset = torch.arange(tile.columns, device=q.device) - torch.arange(tile.rows, device=q.device).unsqueeze(
        1
    )
    hidden = (offset < low) | (offset > high)
    return q.new_zeros(tile.rows, tile.columns).masked_fill_(hidden, -math.inf)


def _forward(q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float) -> tuple[Tensor, Tensor]:
    if q.is_cuda and kernels_flash_attn.serves(q, tile):
        return kernels_flash_attn.forward(q, k, v, tile, scale)
    if q.is_cuda:
        return kernels_cuda.forward(q, k, v, tile.causal, _mask(tile, q), scale)
    out, lse = ATEN._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, tile.causal, attn_mask=_mask(tile, q), scale=scale
    )
    return out, lse


def _backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    if q.is_cuda and kernels_flash_attn.serves(q, tile):
        return kernels_flash_attn.backward(grad_out, q, k, v, out, lse, tile, scale)
    if q.is_cuda:
        return kernels_cuda.backward(grad_out, q, k, v, out, lse, tile.causal, _mask(tile, q), scale)
    grads: tuple[Tensor, Tensor, Tensor] = ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, lse, 0.0, tile.causal, attn_mask=_mask(tile, q), scale=scale
    )
    return grads
