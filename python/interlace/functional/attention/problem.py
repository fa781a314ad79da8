"""One call of context-parallel attention as every rank must see it, and the check that they do."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ...groups import GroupInfo
from ...ops import OPS
from .spans import Span, spans_of
from .tiles import Tile, tiles, visible_pairs

__all__ = ["Problem", "agree", "problem_of", "visible_pairs_of"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Problem:
    """Which tokens every rank holds and which of them may see which."""

    spans: tuple[tuple[Span, ...], ...]  # by rank
    causal: bool
    window: int | None
    scale: float

    @classmethod
    def of_layout(
        cls, layout: str, length: int, world_size: int, *, causal: bool, window: int | None,
        cu_seqlens: Sequence[int] | None, scale: float = 1.0,
    ) -> Problem:  # fmt: skip
        """The problem of a sequence of `length` tokens. ValueError when the layout cannot deal it out."""
        documents = None if cu_seqlens is None else tuple(cu_seqlens)
        return cls(_spans(layout, length, world_size, 1, documents), causal, window, scale)

    @property
    def world_size(self) -> int:
        return len(self.spans)

    def tiles(self, rank: int, peer: int) -> tuple[Tile, ...]:
        """What the queries of `rank` compute with the keys of `peer`."""
        return _tiles(self.spans[rank], self.spans[peer], self.causal, self.window)

    def readers(self, rank: int) -> list[int]:
        """Other ranks whose queries see a key of `rank`."""
        return [r for r in range(self.world_size) if r != rank and self.tiles(r, rank)]

    def peers(self, rank: int) -> list[int]:
        """The ranks whose keys `rank` visits, in the order of the ring: its own, that of the rank before, .."""
        return [(rank - step) % self.world_size for step in range(self.world_size)]


def visible_pairs_of(problem: Problem, rank: int) -> int:
    """(query, key) pairs of `rank` that the mask lets through."""
    keys = range(problem.world_size)
    return sum(
        visible_pairs(problem.spans[rank], problem.spans[peer], problem.causal, problem.window)
        for peer in keys
    )


@lru_cache(maxsize=256)
def _tiles(
    queries: tuple[Span, ...], keys: tuple[Span, ...], causal: bool, window: int | None
) -> tuple[Tile, ...]:
    return tuple(tiles(queries, keys, causal, window))


@lru_cache(maxsize=64)
def _spans(
    layout: str, length: int, world_size: int, inside: int, cu_seqlens: tuple[int, ...] | None
) -> tuple[tuple[Span, ...], ...]:
    total = world_size * inside
    local = length // total
    held = []
    for rank in range(world_size):
        mine: list[Span] = []
        for place in range(inside):
            for span in spans_of(layout, length, total, rank * inside + place, cu_seqlens):
                _append(mine, replace(span, offset=span.offset + place * local))
        held.append(tuple(mine))
    return tuple(held)


def _append(spans: list[Span], span: Span) -> None:
    """Add a span; one that goes on where the last one ends makes it longer."""
    if spans:
        last = spans[-1]
        ends = (last.offset + last.length, last.start + last.length * last.step, last.step, last.document)
        if ends == (span.offset, span.start, span.step, span.document):
            spans[-1] = replace(last, length=last.length + span.length)
            return
    spans.append(span)


def problem_of(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    world_size: int,
    *,
    causal: bool,
    scale: float | None,
    layout: str,
    window: int | None,
    cu_seqlens: Sequence[int] | None,
    inside: int = 1,
) -> Problem:
    """The problem of q [B, Hq, S/R, D], k, v [B, Hkv, S/R, D]. Raises ValueError or TypeError, naming `op`.

    inside: how many shards of the layout, one after the other, each of the `world_size` tensors holds.
    """
    if q.dim() != 4 or k.dim() != 4 or v.shape != k.shape:
        raise ValueError(
            f"{op}: got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}; expected q [B, Hq, S/R, D] and "
            "k, v [B, Hkv, S/R, D]"
        )
    batch, heads, length, width = q.shape
    if (k.shape[0], k.shape[2], k.shape[3]) != (batch, length, width):
        raise ValueError(
            f"{op}: q {list(q.shape)} and k {list(k.shape)} differ in batch, tokens or head size; every rank gives "
            "the queries and the keys of the same tokens"
        )
    if not k.shape[1] or heads % k.shape[1]:
        raise ValueError(f"{op}: {heads} query heads are no multiple of {k.shape[1]} key/value heads")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in _DTYPES:
        raise TypeError(
            f"{op}: q is {q.dtype}, k {k.dtype}, v {v.dtype}; expected one of float32, bfloat16, float16 for all three"
        )
    if not q.device == k.device == v.device:
        raise ValueError(f"{op}: q is on {q.device}, k on {k.device}, v on {v.device}; expected one device")
    if window is not None and (window < 1 or not causal):
        raise ValueError(
            f"{op}: window={window} with causal={causal}; expected a window >= 1 and causal=True"
        )
    if scale is not None and not (math.isfinite(scale) and scale != 0):
        raise ValueError(f"{op}: scale={scale}; expected a finite number, or None for 1/sqrt(head size)")
    if cu_seqlens is not None and batch != 1:
        raise ValueError(
            f"{op}: cu_seqlens with a batch of {batch}; packed documents are one sequence, batch 1"
        )
    try:
        documents = None if cu_seqlens is None else tuple(cu_seqlens)
        spans = _spans(layout, length * world_size, world_size, inside, documents)
    except ValueError as error:
        raise ValueError(f"{op}: {error}") from None
    return Problem(spans, causal, window, 1 / math.sqrt(width) if scale is None else scale)


_NAMES = (
    "batch",
    "query heads",
    "key/value heads",
    "tokens per rank",
    "head size",
    "dtype",
    "mask and scale",
)


def agree(op: str, q: Tensor, k: Tensor, problem: Problem, info: GroupInfo) -> None:
    """Raise ValueError on every rank unless all of them make the same call. A barrier at the same time."""
    if info.world_size == 1:
        return
    told = f"{problem.causal}{problem.window}{problem.spans}".encode()
    digest = zlib.crc32(told + struct.pack("d", problem.scale))
    mine = [q.shape[0], q.shape[1], k.shape[1], q.shape[2], q.shape[3], _DTYPES.index(q.dtype), digest]
    row = torch.tensor(mine, dtype=torch.int64, device=q.device)
    everyone = (
        OPS.all_gather(row, 0, info.name, len(mine) * info.world_size).view(info.world_size, -1).tolist()
    )
    for rank, other in enumerate(everyone):
        for name, first, value in zip(_NAMES, everyone[0], other, strict=True):
            if first != value:
                told_of = (
                    f"{name} (causal, window, scale, layout or cu_seqlens)"
                    if name == _NAMES[-1]
                    else f"{name} ({first} and {value})"
                )
                raise ValueError(
                    f"{op}: ranks 0 and {rank} differ in {told_of}; every rank makes the same call"
                )
