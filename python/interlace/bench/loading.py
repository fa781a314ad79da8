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
    """Variants whose weights are all equal: fused, each rank reads its slices; baseline, each rank reads all."""
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

    held, wanted = interlace.full_state_dict(shards()), whole().state_dict()
    differing = [float((held[name] != tensor).sum()) for name, tensor in wanted.items()]
    session.check(f"{what} fused", torch.tensor(differing), torch.zeros(len(wanted)), 0.0)
    return {"fused": shards, "baseline": whole}


def _read(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.detach().amax()
    return model
