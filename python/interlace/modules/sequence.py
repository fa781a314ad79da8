"""How long the sequence is of which every rank has a shard."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .shard import Shards

__all__ = ["SequenceLength"]


@dataclass
class SequenceLength:
    """Length of the sequence that is cut at the moment; 0: unknown, so the shards are taken to be equal."""

    size: int = 0

    def of(self, shard: Tensor, dim: int, rank: int, world_size: int) -> int | None:
        """The whole length. ValueError when the shard is of another sequence."""
        if not self.size:
            return None
        if Shards.chunk(self.size, world_size).sizes[rank] != shard.shape[dim]:
            raise ValueError(
                f"a shard of {shard.shape[dim]} tokens is no part of the last sequence of {self.size}; "
                "under activation checkpointing run backward before a forward of another length"
            )
        return self.size
