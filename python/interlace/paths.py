"""Which way calls go: choose it (`backend`), ask for it afterwards (`last_path`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from ._native import _C
from .config import settings

__all__ = ["Path", "backend", "last_path"]

_CODES = {"auto": 0, "fused": 1, "reference": 2}


@dataclass(frozen=True)
class Path:
    """Which way the last op of this thread went, and why. `fused` is False on torch.distributed."""

    op: str
    algorithm: str
    reason: str
    fused: bool


def last_path() -> Path:
    """The path of this thread's last op: its name, algorithm, the reason for it. op is "no call" before the first."""
    return Path(*_C.last_path())


@contextmanager
def backend(choice: Literal["auto", "fused", "reference"]) -> Iterator[None]:
    """Send this thread's ops one way inside a `with` block.

    auto: shared memory where the group has it, else torch.distributed. fused: shared memory or RuntimeError.
    reference: torch.distributed. All ranks of a group must choose the same. ValueError for another word.
    """
    if choice not in _CODES:
        raise ValueError(f"interlace.backend: {choice!r}; expected one of {', '.join(map(repr, _CODES))}")
    before = _C.backend()
    _C.set_backend(_CODES[choice])
    try:
        yield
    finally:
        _C.set_backend(before)


_C.set_default_backend(_CODES[settings.backend])
_C.set_print_paths(settings.print_config)
