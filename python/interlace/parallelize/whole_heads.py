"""Attention weights in the output of a model that has its heads cut: of all heads, as the unsplit model gives them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import functional
from ..groups import GroupInfo, resolve
from ..modules.linear import gather_features
from ..modules.shard import Shards

__all__ = ["WholeHeads", "gather_heads"]

OUTPUTS = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
COUNTS = {"encoder": ("encoder_attention_heads",), "decoder": ("decoder_attention_heads",)}
COUNTS["cross"] = COUNTS["decoder"]


def gather_heads(model: nn.Module, info: GroupInfo) -> None:
    """Give the models of transformers in `model` a hook that gathers attention weights, if they are asked for."""
    for module in model.modules() if info.world_size > 1 else ():
        if hasattr(type(module), "get_input_embeddings") and hasattr(module, "config"):
            module.register_forward_hook(WholeHeads(info.name))


class WholeHeads:
    """Forward hook of a model: attention weights [B, heads of this rank, ..] in its output -> [B, all heads, ..].

    Collective, but only where output_attentions=True. RuntimeError where the ranks' heads are not those of the config.
    """

    def __init__(self, group_name: str) -> None:
        self.group_name = group_name

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not isinstance(output, dict):
            return
        for name in OUTPUTS:
            weights = output.get(name)
            if isinstance(weights, tuple) and any(isinstance(w, Tensor) for w in weights):
                output[name] = self._whole(name, weights, _heads(module, name))

    def _whole(self, name: str, weights: tuple[Any, ...], heads: set[int]) -> tuple[Any, ...]:
        info = resolve(self.group_name)
        of_rank = [w.shape[1] if isinstance(w, Tensor) else 0 for w in weights]
        device = next(w.device for w in weights if isinstance(w, Tensor))
        counts = functional.all_gather(
            torch.tensor([of_rank], dtype=torch.float32, device=device), group=info.name
        )
        return tuple(
            self._gathered(name, w, [int(n) for n in column], heads, info) if isinstance(w, Tensor) else w
            for w, column in zip(weights, counts.t().tolist(), strict=True)
        )

    def _gathered(self, name: str, w: Tensor, counts: list[int], heads: set[int], info: GroupInfo) -> Tensor:
        whole, cut = set(counts) <= heads, sum(counts) in heads
        if whole == cut:
            raise RuntimeError(
                f"parallelize: {name} of the ranks have {counts} heads, and by the config all are {sorted(heads)}: "
                "parts cannot be told from wholes; do not ask for output_attentions of this model"
            )
        if whole:
            return w  # gathered by a model inside, or never cut
        return gather_features(
            w.movedim(1, -1), Shards.partition(counts), info.name, info.world_size
        ).movedim(-1, 1)


def _heads(module: nn.Module, output: str) -> set[int]:
    """How many heads a layer whose weights are in this output may have."""
    config: Any = module.config
    configs = [config, config.get_text_config()] if hasattr(config, "get_text_config") else [config]
    general = ("num_attention_heads", *COUNTS["encoder"], *COUNTS["decoder"])
    for names in (COUNTS.get(output.partition("_")[0], general), general):
        found = {n for c in configs for name in names if isinstance(n := getattr(c, name, None), int)}
        if found:
            return found
    return set()
