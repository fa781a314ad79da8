"""A decoder with its key/value cache, whatever the release of transformers calls it."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

__all__ = ["Decoder"]


class Decoder:
    """Feeds a causal model token by token: each call continues where the last one ended."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        known = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in known else "past_key_values"
        # prefill needs the last token's logits only; the product with the vocabulary is the largest of all
        self._options: dict[str, Any] = {"use_cache": True} | (
            {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        )
        self._cache: Any = None

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [1, S] -> logits [V] after the last of them."""
        out = self.model(input_ids=ids, **{self._cache_name: self._cache}, **self._options)
        self._cache = out[self._cache_name]
        logits: Tensor = out.logits
        return logits[0, -1]
