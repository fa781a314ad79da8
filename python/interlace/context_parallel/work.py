"""How much attention every rank computes under a layout, and how much it moves: the balance, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..functional.attention import Problem, visible_pairs_of

__all__ = ["Work", "work_of"]


@dataclass(frozen=True)
class Work:
    """Attention of one head over one sequence, by rank.

    pairs: (query, key) pairs that the mask lets through. tokens_read: tokens of other ranks whose keys and values
    the rank visits; times 2 x key/value heads x head size x element size they are the bytes that move.
    """

    pairs: tuple[int, ...]
    tokens_read: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """max / mean of the pairs: 1 is perfect, and the time of the slowest rank is this times the ideal."""
        total = sum(self.pairs)
        return max(self.pairs) * len(self.pairs) / total if total else 1.0

    def kv_bytes(self, kv_heads: int, head_dim: int, element_size: int) -> int:
        """Bytes of keys and values that cross ranks in a forward pass of one layer, all ranks together."""
        return sum(self.tokens_read) * 2 * kv_heads * head_dim * element_size

    def __str__(self) -> str:
        share = ", ".join(f"{pairs:,}" for pairs in self.pairs)
        return f"work per rank {share} pairs, max/mean {self.imbalance:.3f}"


def work_of(
    layout: str,
    length: int,
    world_size: int,
    *,
    causal: bool = True,
    window: int | None = None,
    cu_seqlens: Sequence[int] | None = None,
) -> Work:
    """The work of every rank on a sequence of `length` tokens. Raises ValueError when the length does not divide."""
    problem = Problem.of_layout(
        layout, length, world_size, causal=causal, window=window, cu_seqlens=cu_seqlens
    )
    ranks = range(world_size)
    pairs = tuple(visible_pairs_of(problem, rank) for rank in ranks)
    local = length // world_size
    read = tuple(local * sum(1 for p in ranks if p != r and problem.tiles(r, p)) for r in ranks)
    return Work(pairs, read)
