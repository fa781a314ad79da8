"""Attention of one tile on CUDA by torch's flash and memory-efficient kernels, both with log-sum-exp.

Flash (half precision, no mask, key/value heads as they are) where it can, memory-efficient (any dtype but fp64, masks,
key/value heads repeated) elsewhere. Causal tiles are square, so the two agree about what causal means.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["backward", "forward"]

ATEN = torch.ops.aten
_FLASH_DTYPES = (torch.float16, torch.bfloat16)
_MASK_ALIGNMENT = 16  # elements of a row of the mask, which the memory-efficient kernel loads as vectors


def _by_flash(q: Tensor, mask: Tensor | None) -> bool:
    return mask is None and q.dtype in _FLASH_DTYPES and q.shape[-1] <= 256


def forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """q [B, Hq, M, D], k, v [B, Hkv, N, D], mask [M, N] to be added -> out [B, Hq, M, D], log-sum-exp [B, Hq, M]."""
    if _by_flash(q, mask):
        width = q.shape[-1]
        q, k, v = (_padded(x) for x in (q, k, v))
        out, lse = ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]
        return out.narrow(-1, 0, width), lse.narrow(-1, 0, q.shape[2])
    k, v = _repeated(k, q), _repeated(v, q)
    out, lse = ATEN._scaled_dot_product_efficient_attention(
        q, k, v, _broadcast(mask, q), True, 0.0, causal, scale=scale
    )[:2]
    return out, lse.narrow(-1, 0, q.shape[2])  # the kernel pads the rows of its log-sum-exp


def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool,
    mask: Tensor | None, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v from the out and log-sum-exp of the whole row, of which the tile is a part."""
    rows, width, kv_heads = q.shape[2], q.shape[3], k.shape[1]
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # state of a dropout that there is not
    if _by_flash(q, mask):
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        grads = ATEN._scaled_dot_product_flash_attention_backward(
            _padded(grad_out), _padded(q), _padded(k), _padded(v), _padded(out), lse.contiguous(), None, None,
            rows, k.shape[2], 0.0, causal, state, unused, scale=scale,
        )  # fmt: skip
        grad_q, grad_k, grad_v = (grad.narrow(-1, 0, width) for grad in grads)
        return grad_q, grad_k, grad_v
    lse = F.pad(lse, (0, -rows % 32), value=float("inf"))
    grads = ATEN._scaled_dot_product_efficient_attention_backward(
        grad_out, q, _repeated(k, q), _repeated(v, q), _broadcast(mask, q), out, lse, unused, unused, 0.0,
        [True, True, True, False], causal, scale=scale,
    )  # fmt: skip
    return grads[0], _summed(grads[1], kv_heads), _summed(grads[2], kv_heads)


def _padded(x: Tensor) -> Tensor:
    """Head size to a multiple of 8, as the flash kernel wants it."""
    return F.pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """[B, Hkv, N, D] -> [B, Hq, N, D]"""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _summed(grad: Tensor, kv_heads: int) -> Tensor:
    """[B, Hq, N, D] -> [B, Hkv, N, D]: what the readers of a key/value head give it."""
    return grad if grad.shape[1] == kv_heads else grad.unflatten(1, (kv_heads, -1)).sum(2)


def _broadcast(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """[M, N] -> [B, Hq, M, N] whose rows begin at aligned addresses."""
    if mask is None:
        return None
    columns = mask.shape[-1]
    aligned = F.pad(mask, (0, -columns % _MASK_ALIGNMENT)).narrow(1, 0, columns)
    return aligned.expand(q.shape[0], q.shape[1], *mask.shape)
