"""The model of a rank: whole or some of its layers, split by interlace, wrapped for data parallelism."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from interlace.parallelize import parallelize
from interlace.planner.architecture import read_config
from interlace.planner.pipeline import stage_layers

from .settings import DTYPES, Settings

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["Stage", "build", "chunks_of", "model_config", "shard"]


def model_config(model: str) -> PretrainedConfig:
    """The transformers config of settings.model. Raises ValueError when it is not there or not a language model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    content = dict(read_config(model))
    kind = content.pop("model_type")
    config = AutoConfig.for_model(kind, **content)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"train: model_type {kind!r} is no causal language model")
    return config


class Stage(nn.Module):
    """Some consecutive layers of a causal language model; the first embeds ids, the last has norm and head.

    ids [b, s] or hidden [b, s, h] -> hidden [b, s, h] or logits [b, s, vocab].
    """

    def __init__(self, model: Any, layers: tuple[int, ...]) -> None:
        super().__init__()
        decoder = model.get_decoder()
        count = len(decoder.layers)
        self.first, self.last = layers[0] == 0, layers[-1] == count - 1
        decoder.layers = nn.ModuleList(decoder.layers[index] for index in layers)
        kinds = getattr(decoder.config, "layer_types", None)
        if kinds:
            decoder.config.layer_types = [kinds[index] for index in layers]
        decoder.config.num_hidden_layers = len(layers)
        if not self.first:
            decoder.embed_tokens = None
        if not self.last:
            decoder.norm, model.lm_head = nn.Identity(), nn.Identity()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = {"input_ids": x} if self.first else {"inputs_embeds": x}
        hidden = self.model.get_decoder()(**given, use_cache=False).last_hidden_state
        out: torch.Tensor = self.model.lm_head(hidden)
        return out


def chunks_of(layers: int, settings: Settings, rank: int) -> tuple[tuple[int, ...], ...]:
    """Layer indices of each model chunk of a pipeline rank, as the planner cuts them."""
    parts = settings.pp * settings.interleave
    cut = stage_layers(layers, parts)
    return tuple(cut[rank + chunk * settings.pp] for chunk in range(settings.interleave))


def build(
    config: PretrainedConfig, settings: Settings, mesh: DeviceMesh, layers: tuple[int, ...] | None
) -> nn.Module:
    """The module of one rank: equal weights in every layout, from settings.seed.

    layers: of a pipeline chunk, None for the whole model. Raises ValueError for a model that cannot be cut in stages.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(settings.seed)
    dtype = getattr(torch, DTYPES[settings.dtype])
    # a copy: stages shorten it, and several chunks are built from one
    model = AutoModelForCausalLM.from_config(
        deepcopy(config), dtype=torch.float32, attn_implementation="sdpa"
    )
    model = model.to(dtype)
    model.train()
    if layers is not None:
        _check_stages(model)
        model = Stage(model, layers)
    whole = model if layers is None else model.model
    if settings.recompute == "full":
        whole.gradient_checkpointing_enable({"use_reentrant": False})
    if settings.tp > 1:
        parallelize(model, mesh["tp"], sequence_parallel=settings.sequence_parallel)
    return model


def _check_stages(model: Any) -> None:
    decoder, name = model.get_decoder(), type(model).__name__
    missing = [part for part in ("layers", "embed_tokens", "norm") if not hasattr(decoder, part)]
    if missing or not hasattr(model, "lm_head"):
        raise ValueError(
            f"train: pp > 1 cuts decoders with layers, embed_tokens, norm and lm_head; {name} has others"
        )
    if model.lm_head.weight is decoder.embed_tokens.weight:
        raise ValueError(f"train: pp > 1 needs an untied head; {name} ties it to the embedding")


def shard(model: nn.Module, settings: Settings, mesh: DeviceMesh) -> nn.Module:
    """The module wrapped for data parallelism: DDP for ZeRO 0 and 1, fully_shard for 2 and 3."""
    if settings.dp == 1:
        return model
    if settings.zero < 2:
        group = mesh["dp"].get_group()
        return nn.parallel.DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    from torch.distributed.fsdp import fully_shard

    stack: Any = model
    for layer in stack.get_decoder().layers:
        fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=settings.zero == 3)
    return fully_shard(model, mesh=mesh["dp"], reshard_after_forward=settings.zero == 3)
