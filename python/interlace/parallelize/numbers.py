"""Numbers of heads that model code reads: which must change when a rank holds some of them, which must not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from .source import ForwardReads

__all__ = ["HEAD_DIM", "NUM_HEADS", "Heads", "check_reads", "config_numbers", "own_numbers"]

HEAD_DIM = ("head_dim", "attention_head_size", "head_size", "d_head", "dim_head", "key_value_proj_dim")
NUM_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
NUM_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
GROUPS = ("num_key_value_groups", "n_rep")
WIDTH = ("all_head_size", "inner_dim")
HARMLESS = (*HEAD_DIM, "layer_idx", "sliding_window", "rotary_dim", "rotary_ndims")
SIZE_LIKE = re.compile(r"head|hidden|embed|embd|model|inner|dim|size|width|groups|rep")
PER_HEAD_ARGUMENTS = ("alibi", "position_bias", "head_mask", "relative_position")


@dataclass(frozen=True)
class Heads:
    """How many query and key/value heads of which length."""

    query: int
    key_value: int
    length: int

    @property
    def sizes(self) -> dict[str, int]:
        """The numbers that a split changes, by kind."""
        return {
            "heads": self.query,
            "kv_heads": self.key_value,
            "groups": self.query // self.key_value,
            "width": self.query * self.length,
            "kv_width": self.key_value * self.length,
        }


def _kinds(meanings: Mapping[str, str]) -> dict[str, str]:
    by_name = {"heads": NUM_HEADS, "kv_heads": NUM_KV_HEADS, "groups": GROUPS, "width": WIDTH}
    return {attr: kind for kind, attrs in by_name.items() for attr in attrs} | dict(meanings)


def own_numbers(
    module: nn.Module, heads: Heads, meanings: Mapping[str, str] | None = None
) -> tuple[tuple[str, str], ...]:
    """Attributes of `module` that count its heads, with their kind. meanings: names that mean it in this class."""
    kinds = _kinds(meanings or {})
    return tuple((attr, kind) for attr, kind in kinds.items() if vars(module).get(attr) == heads.sizes[kind])


def config_numbers(module: nn.Module, reads: ForwardReads, heads: Heads) -> tuple[tuple[str, str], ...]:
    """Numbers of heads that the forward reads as `self.config.NAME`, with their kind."""
    config = getattr(module, "config", None)
    return tuple(
        (attr, kind)
        for attr, kind in _kinds({}).items()
        if attr in reads.config and getattr(config, attr, None) == heads.sizes[kind]
    )


def check_reads(
    name: str,
    module: nn.Module,
    reads: ForwardReads,
    heads: Heads,
    changed: set[tuple[str, str]],
    arguments: tuple[str, ...] = (),
) -> None:
    """Raise ValueError when the forward reads a number that a split would make wrong and that is not `changed`.

    changed: (where, attribute) with where "self" or "self.config". arguments: per-head arguments that are known to
    be right.
    """
    sizes = heads.sizes
    of_all_heads = {sizes[kind] for kind in ("heads", "kv_heads", "width", "kv_width")}
    config = getattr(module, "config", None)
    found = [("self", attr, getattr(module, attr, None)) for attr in sorted(reads.attributes)]
    found += [("self.config", attr, getattr(config, attr, None)) for attr in sorted(reads.config)]
    for where, attr, value in found:
        is_size = isinstance(value, int) and not isinstance(value, bool) and value in of_all_heads
        if is_size and SIZE_LIKE.search(attr) and (where, attr) not in changed and attr not in HARMLESS:
            raise ValueError(
                f"{name}: its forward reads {where}.{attr}={value}, which a split of the heads would change"
            )
    for width in sorted(reads.widths & reads.loads):
        raise ValueError(
            f"{name}: its forward reshapes by {width}, the width of its input, and not by its heads"
        )
    for argument in reads.parameters:
        if argument in PER_HEAD_ARGUMENTS and argument not in arguments:
            raise ValueError(f"{name}: its forward takes {argument}, which holds values for all heads")
