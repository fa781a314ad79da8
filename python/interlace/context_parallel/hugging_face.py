"""Context-parallel attention as an attention function of transformers, put in the place of the stock ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import ContextAttention
from .suitable import check_mask, check_models

__all__ = ["replace_attention"]

STOCK = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
# what the scores are changed by, so that they are no plain softmax(scale Q K^T)
REFUSED = ("softcap", "s_aux", "position_bias", "head_mask")


def replace_attention(attention: ContextAttention) -> Callable[[], None]:
    """Make every stock attention of transformers run over the ranks of `attention`. Returns what undoes it.

    Models keep their `attn_implementation`; masks are no longer built, since layout, window and documents
    (cu_seq_lens_q, as `shard_batch` gives it) say everything. Calls whose attention is not of this kind raise
    ValueError: dropout, soft-capping, sinks, a key/value cache with earlier tokens, cross attention, other masks. So
    do models whose attention is not asked of transformers, or that mix tokens by more than attention.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    undo = [
        _replace(type(ALL_ATTENTION_FUNCTIONS)._global_mapping, _attention_function(attention)),
        _replace(type(ALL_MASK_ATTENTION_FUNCTIONS)._global_mapping, _no_mask),
        check_models(),
    ]

    def restore() -> None:
        while undo:
            undo.pop()()

    return restore


def _replace(mapping: dict[str, Any], function: Callable[..., Any]) -> Callable[[], None]:
    before = {name: mapping.get(name) for name in STOCK}
    mapping.update(dict.fromkeys(STOCK, function))

    def restore() -> None:
        for name, old in before.items():
            if old is None:
                mapping.pop(name, None)
            else:
                mapping[name] = old

    return restore


def _no_mask(*_: Any, attention_mask: Tensor | None = None, mask_function: Any = None, **__: Any) -> None:
    if not torch.compiler.is_compiling():
        check_mask(mask_function)
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError(
            "context parallel: the model got an attention_mask with hidden tokens; deal the batch out with "
            "interlace.context_parallel.shard_batch, which takes the mask in"
        )


def _attention_function(attention: ContextAttention) -> Callable[..., tuple[Tensor, None]]:
    def context_parallel_attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """query [B, Hq, S/R, D], key [B, Hkv, S/R, D], value [B, Hkv, S/R, V] -> [B, S/R, Hq, V]."""
        _check(module, query, key, attention_mask, dropout, kwargs)
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        features, wide = value.shape[-1], max(query.shape[-1], value.shape[-1])
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        # latent attention has values of another size than queries: zeros change neither scores nor results
        query, key, value = (_widened(x, wide) for x in (query, key, value))
        out = attention(
            query, key, value, causal=causal, scale=scale, window=sliding_window,
            cu_seqlens=kwargs.get("cu_seq_lens_q"),
        )  # fmt: skip
        return out[..., :features].transpose(1, 2).contiguous(), None

    return context_parallel_attention


def _widened(x: Tensor, features: int) -> Tensor:
    return x if x.shape[-1] == features else F.pad(x, (0, features - x.shape[-1]))


def _check(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, dropout: float, kwargs: dict[str, Any]
) -> None:
    reason = ""
    if mask is not None:
        reason = (
            f"got a mask {list(mask.shape)}; causal, window and documents are what a split sequence can have"
        )
    elif dropout:
        reason = f"attention dropout {dropout} is not supported; set attention_dropout=0 in the config"
    elif query.shape[2] != key.shape[2]:
        reason = (
            f"{query.shape[2]} queries against {key.shape[2]} keys; earlier tokens of a cache and cross attention "
            "are not split, call model(..., use_cache=False)"
        )
    else:
        changed = [name for name in REFUSED if kwargs.get(name) is not None]
        if changed:
            reason = f"{changed[0]} changes the scores in a way that blocks cannot be merged for"
    if reason:
        raise ValueError(f"context parallel: {type(module).__name__}: {reason}")
