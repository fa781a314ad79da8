"""Operands of a timed call: hot, the same ones each time, or cold, in turn so that they come from memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

import interlace

__all__ = ["cache_bytes", "caches_of", "copies_for", "packed", "turning"]

T = TypeVar("T")

CACHE_BYTES = 80 << 20  # when the system does not say how large its caches are; more than most have
TWICE = 2.5  # times the last-level cache: what is used in turn has left it before its turn comes again
MOST_COPIES = 64


def cache_bytes(device: str = "cpu") -> int:
    """Bytes that no cache of this device holds."""
    if device == "cuda":
        return int(TWICE * torch.cuda.get_device_properties(0).L2_cache_size)
    sizes = [_kibi(path) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return int(TWICE * max(sizes)) if sizes else CACHE_BYTES


def _kibi(path: Path) -> int:
    try:
        text = path.read_text().strip()
        return int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1:], 0)
    except (OSError, ValueError):
        return 0


def caches_of(settings: Mapping[str, object]) -> tuple[str, ...]:
    """hot, cold or both, as --cache says."""
    chosen = str(settings.get("cache", "cold"))
    return ("cold", "hot") if chosen == "both" else (chosen,)


def copies_for(size: int, cache: str, device: str = "cpu") -> int:
    """How many operands of `size` bytes to use in turn: one when hot; cold, as many as no cache holds, 64 at most."""
    return 1 if cache == "hot" else max(1, min(MOST_COPIES, -(-cache_bytes(device) // max(size, 1))))


def turning(items: Sequence[T]) -> Callable[[], T]:
    """A function that returns the items in turn, for ever. Variants share one: what one has just read is not next."""
    place = -1

    def take() -> T:
        nonlocal place
        place = (place + 1) % len(items)
        return items[place]

    return take


def packed(weight: Tensor, settings: Mapping[str, object]) -> Tensor:
    """A frozen weight as the tile engine wants it; as it is with --plain, or where there is no tile engine."""
    if settings.get("plain"):
        return weight
    try:
        return interlace.PackedWeight.pack(weight)
    except RuntimeError:
        return weight
