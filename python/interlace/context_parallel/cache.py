"""A key/value cache whose tokens are spread over the ranks that hold the sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ShardedKVCache"]


@dataclass
class ShardedKVCache:
    """This rank's keys and values [B, kv heads, tokens here, D], with their positions; empty at first.

    Tokens of the prompt stay where they were computed; token n of those decoded later goes to rank n mod ranks, so
    that the cache grows evenly.
    """

    keys: Tensor | None = None
    values: Tensor | None = None
    positions: Tensor | None = None  # [tokens here]
    length: int = 0  # of the whole sequence

    def add_shard(self, keys: Tensor, values: Tensor, positions: Tensor, total: int) -> None:
        """This rank's tokens of a prompt of `total` tokens."""
        self._add(keys, values, positions)
        self.length += total

    def add_decoded(self, keys: Tensor, values: Tensor, rank: int, world_size: int) -> Tensor:
        """New tokens that every rank computed; returns their positions."""
        count = keys.shape[2]
        positions = torch.arange(self.length, self.length + count, device=keys.device)
        mine = (positions % world_size == rank).nonzero().flatten()
        if mine.numel():
            self._add(keys.index_select(2, mine), values.index_select(2, mine), positions[mine])
        self.length += count
        return positions

    def held(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and positions on this rank; without any, empty ones shaped as `like` [B, kv heads, .., D]."""
        if self.keys is None or self.values is None or self.positions is None:
            none = like.new_empty(like.shape[0], like.shape[1], 0, like.shape[3])
            return none, none, torch.zeros(0, dtype=torch.int64, device=like.device)
        return self.keys, self.values, self.positions

    def _add(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        old_keys, old_values, old_positions = self.held(keys)
        self.keys = torch.cat([old_keys, keys], 2)
        self.values = torch.cat([old_values, values], 2)
        self.positions = torch.cat([old_positions, positions])
