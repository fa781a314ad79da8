"""Which tokens of a sequence each rank holds.

A span is an arithmetic progression of token positions that lie side by side in memory; what a rank holds is a list of
spans, in the order in which its tensor holds them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = ["LAYOUTS", "Span", "positions_of", "spans_of", "tokens_of"]

LAYOUTS = ("contiguous", "zigzag", "striped")


@dataclass(frozen=True)
class Span:
    """Positions start, start + step, .. of `document`; the first of them is token `offset` of the rank's tensor."""

    offset: int
    start: int
    length: int
    step: int = 1
    document: int = 0

    def cut(self, begin: int, end: int, document: int) -> Span | None:
        """The part at positions in [begin, end), as tokens of that document; None when there is none."""
        first = max(0, -(-(begin - self.start) // self.step))
        last = min(self.length, -(-(end - self.start) // self.step))
        if first >= last:
            return None
        return Span(self.offset + first, self.start + first * self.step, last - first, self.step, document)


def spans_of(
    layout: str, length: int, world_size: int, rank: int, cu_seqlens: Sequence[int] | None = None
) -> list[Span]:
    """The tokens of `rank` when a sequence of `length` tokens is dealt out over `world_size` ranks.

    contiguous: rank r has the r-th of world_size equal slices. zigzag: of 2 * world_size equal slices the r-th and
    the r-th last, so that under a causal mask every rank has the same work. striped: tokens r, r + world_size, ..
    (Brandon et al., arXiv 2311.09431). With `cu_seqlens` [0, end of document 0, ..] zigzag deals out every document
    for itself; the other layouts deal out the packed sequence and documents are cut where they fall.
    Raises ValueError when the length does not divide; the text says how much padding makes it.
    """
    documents = list(cu_seqlens) if cu_seqlens is not None else [0, length]
    _check(layout, length, world_size, documents)
    if layout == "zigzag":
        spans: list[Span] = []
        offset = 0
        for document, (begin, end) in enumerate(itertools.pairwise(documents)):
            size = (end - begin) // (2 * world_size)
            for part in (rank, 2 * world_size - 1 - rank):
                if size:
                    spans.append(Span(offset, begin + part * size, size, 1, document))
                    offset += size
        return spans
    local = length // world_size
    whole = Span(0, rank * local, local) if layout == "contiguous" else Span(0, rank, local, world_size)
    cuts = [whole.cut(b, e, d) for d, (b, e) in enumerate(itertools.pairwise(documents))]
    return [span for span in cuts if span is not None]


def tokens_of(spans: Sequence[Span]) -> Tensor:
    """Positions of a rank's tokens in the whole sequence, in the order in which it holds them, int64."""
    runs = [torch.arange(span.length) * span.step + span.start for span in spans]
    return torch.cat(runs) if runs else torch.zeros(0, dtype=torch.int64)


def positions_of(
    layout: str, length: int, world_size: int, cu_seqlens: Sequence[int] | None = None
) -> list[Tensor]:
    """By rank: positions of its tokens, each counted from the start of its document, int64 [length / world_size]."""
    starts = cu_seqlens if cu_seqlens is not None else [0]
    by_rank = [spans_of(layout, length, world_size, rank, cu_seqlens) for rank in range(world_size)]
    return [tokens_of([replace(s, start=s.start - starts[s.document]) for s in spans]) for spans in by_rank]


def _check(layout: str, length: int, world_size: int, documents: list[int]) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}; expected one of {', '.join(LAYOUTS)}")
    if len(documents) < 2 or documents[0] != 0 or documents[-1] != length or sorted(documents) != documents:
        raise ValueError(
            f"cu_seqlens={documents} does not describe {length} tokens; expected [0, end of the first document, .., "
            f"{length}], never decreasing"
        )
    unit = 2 * world_size if layout == "zigzag" else world_size
    pieces = [(b, e) for b, e in itertools.pairwise(documents)] if layout == "zigzag" else [(0, length)]
    for begin, end in pieces:
        size = end - begin
        if size % unit:
            what = "the sequence" if len(pieces) == 1 else f"the document at [{begin}, {end})"
            raise ValueError(
                f"layout={layout!r} over {world_size} ranks needs a multiple of {unit} tokens, {what} has {size}; "
                f"pad it by {-size % unit} (interlace.context_parallel.shard_batch does)"
            )
