"""Heads against tokens: every rank gives its tokens of all heads and gets all tokens of its heads, by one all-to-all.

Jacobs et al., arXiv 2309.14509. Heads need not divide; key/value heads that several ranks read are sent to each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..collectives import all_to_all

__all__ = ["HeadSplit", "balanced_sizes", "gather_tokens", "head_shards", "scatter_tokens", "split_heads"]


@dataclass(frozen=True)
class HeadSplit:
    """The query heads of every rank, a partition in order, and the key/value heads that they read."""

    query: tuple[range, ...]
    key_value: tuple[range, ...]


def balanced_sizes(count: int, parts: int) -> tuple[int, ...]:
    """`count` cut in `parts` that differ by at most one, the larger first."""
    return tuple(count // parts + (part < count % parts) for part in range(parts))


@lru_cache(maxsize=64)
def split_heads(heads: int, kv_heads: int, world_size: int) -> HeadSplit:
    """Whole groups (a key/value head and its readers) to ranks as evenly as it goes; with fewer groups than ranks
    the readers of a group are spread over several ranks. A rank may get none.
    """
    per_group = heads // kv_heads
    query, key_value = [], []
    if kv_heads >= world_size:
        begin = 0
        for size in balanced_sizes(kv_heads, world_size):
            query.append(range(begin * per_group, (begin + size) * per_group))
            key_value.append(range(begin, begin + size))
            begin += size
        return HeadSplit(tuple(query), tuple(key_value))
    for group, ranks in enumerate(balanced_sizes(world_size, kv_heads)):
        begin = group * per_group
        for size in balanced_sizes(per_group, ranks):
            query.append(range(begin, begin + size))
            key_value.append(range(group, group + (size > 0)))
            begin += size
    return HeadSplit(tuple(query), tuple(key_value))


def head_shards(
    heads: int, kv_heads: int, world_size: int, head_dim: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """By rank: the features [begin, end) of its query heads, and of the key/value heads that they read."""
    split = split_heads(heads, kv_heads, world_size)
    return tuple(  # type: ignore[return-value]
        [(part.start * head_dim, part.stop * head_dim) for part in parts]
        for parts in (split.query, split.key_value)
    )


def gather_tokens(
    q: Tensor, k: Tensor, v: Tensor, split: HeadSplit, rank: int, group: str
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, Hq, s, D], k, v [B, Hkv, s, D] -> the same of this rank's heads and all ranks' tokens, [B, h, R s, D]."""
    world_size, heads, kv_heads = len(split.query), q.shape[1], k.shape[1]
    order, sizes = [], []
    for queries, keys in zip(split.query, split.key_value, strict=True):
        order += [*queries, *(heads + i for i in keys), *(heads + kv_heads + i for i in keys)]
        sizes.append(len(queries) + 2 * len(keys))
    everything = torch.cat([q, k, v], 1).transpose(0, 1)
    sent = everything.index_select(0, torch.tensor(order, device=q.device))
    got = all_to_all(sent, [sizes[rank]] * world_size, sizes, group=group)
    # [R h, B, s, D] -> [B, h, R s, D]
    got = got.unflatten(0, (world_size, sizes[rank])).permute(2, 1, 0, 3, 4).flatten(2, 3)
    n, m = len(split.query[rank]), len(split.key_value[rank])
    q, k, v = got.split([n, m, m], 1)
    return q, k, v


def scatter_tokens(x: Tensor, split: HeadSplit, rank: int, group: str) -> Tensor:
    """x [B, h, R s, ..] of this rank's query heads -> [B, Hq, s, ..] of this rank's tokens: `gather_tokens` undone."""
    world_size = len(split.query)
    sizes = [len(queries) for queries in split.query]
    sent = _tokens_first(x.unflatten(2, (world_size, x.shape[2] // world_size))).flatten(0, 1)
    got = all_to_all(sent, sizes, [sizes[rank]] * world_size, group=group)
    return got.transpose(0, 1)


def _tokens_first(x: Tensor) -> Tensor:
    """[B, h, R, s, ..] -> [R, h, B, s, ..]"""
    order: Sequence[int] = (2, 1, 0, *range(3, x.dim()))
    return x.permute(*order)
