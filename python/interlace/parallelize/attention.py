"""Who recognises attention: classes whose packing is known first, then projections of the known names."""

from __future__ import annotations

from torch import nn

from .blocks import Attention
from .packed import find_packed
from .separate import find_separate

__all__ = ["find_attention"]


def find_attention(name: str, modules: dict[str, nn.Module], *, trusted: bool) -> Attention | None:
    """The attention block held by module `name`, or None when it has no projections of the known names.

    trusted: the user named its linears in a plan, so the forward is not questioned. Raises ValueError with
    the reason when the block looks like attention but splitting its heads is not known to be right.
    """
    return find_packed(name, modules) or find_separate(name, modules, trusted=trusted)
