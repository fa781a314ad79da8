"""Attention of one tile by the flash-attn package (2.7 or later), where it is installed: bands need no mask there.

It takes [B, tokens, heads, D]; its windows are counted from the diagonal that ends in the last query and last key.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from .tiles import Tile

__all__ = ["backward", "forward", "library", "serves"]

_OLDEST = (2, 7)


@lru_cache(maxsize=1)
def library() -> Any | None:
    """The module with flash-attn's forward and backward, or None."""
    try:
        found = tuple(int(part) for part in version("flash-attn").split(".")[:2])
        if found < _OLDEST or importlib.util.find_spec("flash_attn") is None:
            return None
        return importlib.import_module("flash_attn.flash_attn_interface")
    except (PackageNotFoundError, ImportError, ValueError):
        return None


def _window(tile: Tile) -> tuple[int, int] | None:
    """(left, right) of the tile's band; None when flash-attn cannot say it, whose windows hold the diagonal."""
    if tile.band is None:
        return -1, -1
    shift = tile.columns - tile.rows
    left, right = shift - tile.band[0], tile.band[1] - shift
    return (left, right) if left >= 0 and right >= 0 else None


def serves(q: Tensor, tile: Tile) -> bool:
    """Whether this package computes the tile: half precision, head sizes in steps of 8 up to 256, a band it can say."""
    width = q.shape[-1]
    usable = q.dtype in (torch.float16, torch.bfloat16) and width % 8 == 0 and width <= 256
    return usable and _window(tile) is not None and library() is not None


def _options(tile: Tile, scale: float) -> dict[str, Any]:
    left, right = _window(tile) or (-1, -1)
    return {
        "dropout_p": 0.0, "softmax_scale": scale, "causal": tile.causal, "window_size_left": left,
        "window_size_right": right, "softcap": 0.0, "alibi_slopes": None,
    }  # fmt: skip


def forward(q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float) -> tuple[Tensor, Tensor]:
    """q [B, Hq, M, D], k, v [B, Hkv, N, D] -> out [B, Hq, M, D], log-sum-exp [B, Hq, M] in fp32."""
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    out, lse = _library()._flash_attn_forward(q, k, v, **_options(tile, scale), return_softmax=False)[:2]
    return out.transpose(1, 2), lse


def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v from the out and log-sum-exp of the whole row; deterministic."""
    grad_out, q, k, v, out = (x.transpose(1, 2).contiguous() for x in (grad_out, q, k, v, out))
    grads = [torch.empty_like(x) for x in (q, k, v)]
    _library()._flash_attn_backward(
        grad_out, q, k, v, out, lse.contiguous(), *grads, **_options(tile, scale), deterministic=True
    )
    grad_q, grad_k, grad_v = (grad.transpose(1, 2) for grad in grads)
    return grad_q, grad_k, grad_v


def _library() -> Any:
    found = library()
    assert found is not None  # serves() said so
    return found
