"""From a folder of safetensors to a model that is ready: into shards built on meta, or whole by from_pretrained.

Ready means that every weight was read once: from_pretrained maps the file and would read it later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import interlace
from interlace.pretrained import Source, load

from .session import Session

__all__ = ["loaded"]


def loaded(
    session: Session, what: str, source: Source, dtype: torch.dtype
) -> dict[str, Callable[[], object]]:
    """Checked variants: fused is each rank reading its slices, baseline each rank reading all."""
    import transformers

    config: Any = transformers.AutoConfig.from_pretrained(source.location)

    def shards() -> nn.Module:
        with torch.device("meta"):
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        interlace.parallelize(model, None)
        interlace.load_full_state_dict(model, source.location)
        return _read(model.eval())

    def whole() -> nn.Module:
        return _read(load(source, dtype))

    ids = torch.arange(16).unsqueeze(0)
    limit = 1e-4 if dtype is torch.float32 else 5e-2  # a stack of layers rounds more than a product does
    session.check(f"{what} fused", shards()(input_ids=ids).logits, whole()(input_ids=ids).logits, limit)
    return {"fused": shards, "baseline": whole}


def _read(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.detach().amax()
    return model
