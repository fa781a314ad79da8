"""Arithmetic of shards: which slices of a dimension, and which attention heads, each rank holds. No tensors
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..functional.attention import heads
from ..functional.attention.heads import balanced_sizes

__all__ = ["HeadLayout", "Range", "Shards", "balanced_sizes", "split_heads"]


Range = tuple[int, int]  # start and end of a slice


@dataclass(frozen=True)
class Shards:
    """The slices [start, end) of a dim of `total` that every rank holds, in the order in which it holds them.

    pieces: per rank one slice for a plain shard, several where blocks are packed in one tensor (q|k|v). No rank
    holds an index twice. A partition has each index once; where slices of ranks overlap, several ranks hold the
    same rows (`overlapping`), and the gradient of those rows is summed over their holders.
    """

    total: int
    pieces: tuple[tuple[Range, ...], ...]

    @classmethod
    def slices(cls, total: int, starts: Sequence[int], sizes: Sequence[int]) -> Shards:
        """One slice [start, start + size) per rank."""
        return cls(total, tuple(((start, start + size),) for start, size in zip(starts, sizes, strict=True)))

    @classmethod
    def chunk(cls, total: int, world_size: int) -> Shards:
        """The convention of `torch.chunk`: ceil(total / world_size) for the first ranks, the last shorter or
        empty.
        """
        step = -(-total // world_size)
        starts = [min(total, step * rank) for rank in range(world_size)]
        ends = (*starts[1:], total)
        return cls(total, tuple(((start, end),) for start, end in zip(starts, ends, strict=True)))

    @classmethod
    def partition(cls, sizes: Sequence[int]) -> Shards:
        """Consecutive slices of the given sizes."""
        return cls.slices(sum(sizes), [sum(sizes[:rank]) for rank in range(len(sizes))], sizes)

    @classmethod
    def packed(cls, blocks: Sequence[Shards]) -> Shards:
        """Blocks one behind the other in one tensor, each cut by its own shards: a rank holds a piece of each."""
        offsets = [sum(block.total for block in blocks[:place]) for place in range(len(blocks))]
        ranks = range(len(blocks[0].pieces))
        return cls(
            sum(block.total for block in blocks),
            tuple(
                _joined(
                    [
                        (start + offset, end + offset)
                        for block, offset in zip(blocks, offsets, strict=True)
                        for start, end in block.pieces[rank]
                    ]
                )
                for rank in ranks
            ),
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """How much every rank holds."""
        return tuple(sum(end - start for start, end in pieces) for pieces in self.pieces)

    @property
    def starts(self) -> tuple[int, ...]:
        """Start of the slice of every rank. ValueError when a rank holds several."""
        return tuple(self.bounds(rank)[0] for rank in range(len(self.pieces)))

    @property
    def overlapping(self) -> bool:
        """True when an index lies in more than one slice."""
        return sum(self.sizes) > self.total

    @property
    def is_chunk(self) -> bool:
        """True when this is what `Shards.chunk` gives; collectives know that one without being told the
        sizes.
        """
        return self == Shards.chunk(self.total, len(self.pieces))

    def ranges(self, rank: int) -> tuple[Range, ...]:
        """The slices of `rank`, in the order in which it holds them."""
        return self.pieces[rank]

    def bounds(self, rank: int) -> Range:
        """Start and end of the one slice of `rank`. ValueError when it holds several."""
        if len(self.pieces[rank]) != 1:
            raise ValueError(f"rank {rank} holds {len(self.pieces[rank])} slices, not one; use ranges()")
        return self.pieces[rank][0]

    def scaled(self, factor: int) -> Shards:
        """The same slices in a unit `factor` times finer: heads to rows."""
        return Shards(
            self.total * factor,
            tuple(tuple((a * factor, b * factor) for a, b in pieces) for pieces in self.pieces),
        )

    def shared_ranges(self) -> tuple[Range, ...]:
        """What several ranks hold, as disjoint slices in ascending order."""
        edges = sorted({edge for pieces in self.pieces for piece in pieces for edge in piece})
        held = [
            (a, b)
            for a, b in pairwise(edges)
            if sum(self._holds(rank, a) for rank in range(len(self.pieces))) > 1
        ]
        return _joined(held)

    def _holds(self, rank: int, index: int) -> bool:
        return any(start <= index < end for start, end in self.pieces[rank])


def _joined(pieces: Sequence[Range]) -> tuple[Range, ...]:
    """Pieces that touch as one, without empty ones; one empty piece when nothing is left."""
    joined: list[Range] = []
    for start, end in pieces:
        if start == end:
            continue
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, end))
    return tuple(joined) or tuple(pieces[:1])


def checked_shards(
    op: str, what: str, total: int, world_size: int, shards: Shards | None, sizes: Sequence[int] | None
) -> Shards:
    """`shards`, or `sizes` as a partition, or the chunk convention; ValueError when they do not fit
    `total`.
    """
    if shards is not None and sizes is not None:
        raise ValueError(f"{op}: pass shards or shard_sizes, not both")
    if sizes is not None:
        if any(size < 0 for size in sizes):
            raise ValueError(f"{op}: shard_sizes={tuple(sizes)} has a negative size")
        shards = Shards.partition(tuple(sizes))
    if shards is None:
        return Shards.chunk(total, world_size)
    if len(shards.sizes) != world_size:
        raise ValueError(
            f"{op}: got {len(shards.sizes)} shard sizes {shards.sizes} for a group of {world_size} ranks; "
            "give one size per rank"
        )
    if shards.total != total:
        raise ValueError(f"{op}: shard sizes {shards.sizes} cover {shards.total}, but {what}={total}")
    return shards


@dataclass(frozen=True)
class HeadLayout:
    """Which query heads, which key/value heads and which columns of the output projection each rank holds, in
    heads.

    `query` and `key_value` may overlap (replicated heads), `output` never does: a head counts once in the
    sum. A rank that is idle (more ranks than query heads) computes a copy of a head whose output is dropped.
    """

    query: Shards
    key_value: Shards
    output: Shards

    def local_heads(self, rank: int) -> tuple[int, int]:
        """Query heads and key/value heads on `rank`; the first is a multiple of the second."""
        return self.query.sizes[rank], self.key_value.sizes[rank]

    def is_idle(self, rank: int) -> bool:
        """True when no head of `rank` reaches the output."""
        return self.output.sizes[rank] == 0


def split_heads(op: str, num_heads: int, num_kv_heads: int, world_size: int) -> HeadLayout:
    """Cut attention by key/value groups, evenly or not; replicate key/value heads where there are more ranks.

    num_kv_heads >= world_size: whole groups, for example 9 query / 3 kv heads over 2 ranks = 6+3 / 2+1.
    num_kv_heads < world_size: every rank holds one kv head and a part of the query heads that read it.
    Raises ValueError when num_heads is not a multiple of num_kv_heads.
    """
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"{op}: num_heads={num_heads} is not a positive multiple of num_kv_heads={num_kv_heads}; "
            "each kv head must serve the same number of query heads"
        )
    split = heads.split_heads(num_heads, num_kv_heads, world_size)
    output = Shards.partition([len(part) for part in split.query])
    if num_kv_heads >= world_size:
        kv = Shards.partition([len(part) for part in split.key_value])
        return HeadLayout(query=output, key_value=kv, output=output)
    # an idle rank mirrors the group's last head: attention code meets no empty tensor, and the copy stays equal
    # to its owner because gradients of shared rows are summed
    query = Shards.slices(
        num_heads,
        [part.start if part else part.start - 1 for part in split.query],
        [max(1, len(part)) for part in split.query],
    )
    kv = Shards.slices(num_kv_heads, [part.start for part in split.key_value], [1] * world_size)
    return HeadLayout(query=query, key_value=kv, output=output)
