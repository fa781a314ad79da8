"""Which way calls go: choose it (`backend`), ask for it afterwards (`last_path`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from ._native import _C
from .config import settings

__all__ = ["Path", "backend", "chosen_backend", "last_path", "note_path"]

_CODES = {"auto": 0, "fused": 1, "reference": 2, "decomposed": 3}
_WORDS = {code: word for word, code in _CODES.items()}


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


def note_path(op: str, algorithm: str, reason: str, fused: bool) -> None:
    """Say which way a call goes that Python sends: what `last_path` answers, printed under INTERLACE_PRINT_CONFIG."""
    _C.note_path(op, algorithm, reason, fused)


def chosen_backend() -> str:
    """The word that `backend` was last given on this thread."""
    return _WORDS[_C.backend()]


@contextmanager
def backend(choice: Literal["auto", "fused", "reference", "decomposed"]) -> Iterator[None]:
    """Send this thread's ops one way inside a `with` block.

    auto: shared memory where the group has it, else torch.distributed; on CUDA tensors what the heuristic says.
    fused: kernels of ours on shared memory, or an error. reference: torch.distributed after the product. decomposed:
    products in pieces under torch.distributed; ops that have no such form go as with auto. All ranks of a group must
    choose the same. ValueError for another word.
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
