"""Architectures read from modules: exact counts from the parameters, structure from the config or from the shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from .architecture import Architecture

__all__ = ["architecture_of_module", "architecture_of_unknown"]

_HEAD_NAMES = ("num_attention_heads", "num_heads", "n_heads", "n_head", "nhead", "heads", "nheads")
_KV_HEAD_NAMES = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_local_kv_heads", "kv_heads")


def architecture_of_module(module: nn.Module) -> Architecture:
    """The Architecture of a module, on any device; the total is the module's own count of parameters.

    A Hugging Face model of a known family is read from its config. Otherwise the largest nn.ModuleList is the stack of
    layers, the widest embedding the token table, and the linears of a layer give attention and MLP widths.
    Raises TypeError when it is no module, ValueError when there is no stack of layers or no number of heads.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"plan: expected a config, a path or an nn.Module, got {type(module).__name__}")
    from .model import parameters

    total = sum(p.numel() for p in dict.fromkeys(module.parameters()))
    built = _from_config(module) or _from_shapes(module)
    difference = total - parameters(built).total
    if difference == 0:
        return built
    note = f"{difference:+,} parameters of the module are outside the known parts; they count for the first stage"
    other = built.other_parameters + difference
    return replace(built, other_parameters=other, notes=(*built.notes, note))


def architecture_of_unknown(config: Mapping[str, Any], known: tuple[str, ...]) -> Architecture:
    """The Architecture of a config whose family has no formula here: built on the meta device by transformers.

    Raises ValueError, naming the known families, when transformers is missing or does not know the family either.
    """
    import torch

    kind = config["model_type"]
    try:
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

        fields = {name: value for name, value in config.items() if name != "model_type"}
        built = AutoConfig.for_model(kind, **fields)
        causal = type(built) in AutoModelForCausalLM._model_mapping
        factory = AutoModelForCausalLM if causal else AutoModel
        with torch.device("meta"):
            module = factory.from_config(built)
    except ImportError:
        reason = "transformers, which could build it, is not installed"
    except Exception as error:  # whatever a foreign family's code raises, the user needs one line
        reason = f"transformers cannot build it ({' '.join(str(error).split())[:200]})"
    else:
        return replace(architecture_of_module(module), family=str(kind))
    raise ValueError(f"model_type {kind!r} is not known, and {reason}; known here: {', '.join(known)}")


def _from_config(module: nn.Module) -> Architecture | None:
    config = getattr(module, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        return None
    from .encoders import ENCODERS
    from .families import DECODERS

    content = config.to_dict()
    content["architectures"] = [type(module).__name__]
    reader = {**DECODERS, **ENCODERS}.get(content.get("model_type"))
    return reader(content) if reader else None


def _from_shapes(module: nn.Module) -> Architecture:
    stacks = [m for m in module.modules() if isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m) > 1]
    stacks = [s for s in stacks if any(p.dim() >= 2 for p in s[0].parameters())]
    if not stacks:
        raise ValueError(
            f"plan: {type(module).__name__} has no nn.ModuleList of layers; give a config instead"
        )
    stack = max(stacks, key=lambda s: sum(p.numel() for p in s.parameters()))
    tables = [m for m in module.modules() if isinstance(m, nn.Embedding)]
    linears = [m for m in stack[0].modules() if isinstance(m, nn.Linear)]
    if not linears:
        raise ValueError(
            f"plan: the layers of {type(module).__name__} hold no nn.Linear; give a config instead"
        )
    heads = _attribute(module, stack[0], _HEAD_NAMES)
    if heads is None:
        raise ValueError(f"plan: {type(module).__name__} names no number of heads ({', '.join(_HEAD_NAMES)})")
    widths = [linear.in_features for linear in linears]
    hidden = max(set(widths), key=widths.count)
    vocab = max((t.num_embeddings for t in tables), default=0)
    wide = [m.out_features for m in linears if m.in_features == hidden]
    down = [m.in_features for m in linears if m.out_features == hidden and m.in_features != hidden]
    intermediate = down[-1] if down else max(wide)
    heads_out = [m for m in module.modules() if isinstance(m, nn.Linear) and m.out_features == vocab]
    table_ids = {id(t.weight) for t in tables}
    tied = not heads_out or id(heads_out[0].weight) in table_ids
    return Architecture(
        family=type(module).__name__,
        hidden=hidden,
        layers=len(stack),
        heads=heads,
        kv_heads=_attribute(module, stack[0], _KV_HEAD_NAMES) or heads,
        head_dim=hidden // heads,
        intermediate=intermediate,
        vocab=vocab,
        tied=tied,
        gated=sum(width == intermediate for width in wide) >= 2 or 2 * intermediate in wide,
        head="lm" if vocab else "none",
        notes=("read from the shapes of the module: widths of its linears, heads by attribute",),
    )


def _attribute(module: nn.Module, layer: nn.Module, names: tuple[str, ...]) -> int | None:
    places: list[object] = [*layer.modules(), module, getattr(module, "config", None)]
    for place in places:
        for name in names:
            value = getattr(place, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None
