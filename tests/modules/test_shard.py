"""Arithmetic of shards and heads: pure functions, no processes."""

from __future__ import annotations

import pytest
import torch

from interlace.modules.shard import Shards, balanced_sizes, checked_shards, split_heads


@pytest.mark.parametrize("world_size", range(1, 9))
def test_chunk_is_the_convention_of_torch(world_size: int) -> None:
    """Every rank has a slice, also where torch.chunk returns fewer than asked."""
    for total in range(40):
        parts = [part.tolist() for part in torch.arange(total).chunk(world_size)] if total else []
        parts += [[]] * (world_size - len(parts))
        shards = Shards.chunk(total, world_size)
        assert [list(range(*shards.bounds(rank))) for rank in range(world_size)] == parts
        assert shards.is_chunk and not shards.overlapping


def test_a_partition_of_other_sizes_is_not_taken_for_a_chunk() -> None:
    """Collectives that assume torch.chunk's sizes must not be used for these."""
    assert not Shards.partition((6, 3)).is_chunk
    assert not Shards.partition((1, 4)).is_chunk
    assert Shards.partition((3, 2)).is_chunk


@pytest.mark.parametrize(
    ("heads", "kv_heads", "world_size", "query", "key_value"),
    [
        (9, 3, 2, ["012345", "678"], ["01", "2"]),
        (9, 3, 3, ["012", "345", "678"], ["0", "1", "2"]),
        (9, 3, 4, ["01", "2", "345", "678"], ["0", "0", "1", "2"]),
        (4, 1, 2, ["01", "23"], ["0", "0"]),
        (8, 2, 3, ["01", "23", "4567"], ["0", "0", "1"]),
        (4, 4, 3, ["01", "2", "3"], ["01", "2", "3"]),
        (2, 1, 4, ["0", "1", "1", "1"], ["0", "0", "0", "0"]),
    ],
)
def test_heads_are_split_by_kv_groups(
    heads: int, kv_heads: int, world_size: int, query: list[str], key_value: list[str]
) -> None:
    """A query head must be on the rank of its kv head, and every rank must serve whole ratios."""
    layout = split_heads("test", heads, kv_heads, world_size)
    text = [
        ["".join(map(str, range(*s.bounds(r)))) for r in range(world_size)]
        for s in (layout.query, layout.key_value)
    ]
    assert text == [query, key_value]


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize("kv_heads", range(1, 9))
@pytest.mark.parametrize("per_group", range(1, 5))
def test_every_head_reaches_the_output_once(kv_heads: int, per_group: int, world_size: int) -> None:
    """Whatever the ratio: output shards are a partition, and query heads sit with the kv head they read."""
    heads = kv_heads * per_group
    layout = split_heads("test", heads, kv_heads, world_size)
    out = [head for rank in range(world_size) for head in range(*layout.output.bounds(rank))]
    assert out == list(range(heads))
    for rank in range(world_size):
        local, local_kv = layout.local_heads(rank)
        assert local_kv >= 1 and local % local_kv == 0
        if not layout.is_idle(rank):
            assert layout.query.bounds(rank) == layout.output.bounds(rank)
        first_kv = layout.key_value.starts[rank]
        for place, head in enumerate(range(*layout.query.bounds(rank))):
            assert head // per_group == first_kv + place // (local // local_kv)


def test_balanced_sizes_differ_by_one_at_most() -> None:
    assert balanced_sizes(10, 4) == (3, 3, 2, 2)
    assert balanced_sizes(1, 3) == (1, 0, 0)


def test_mistakes_name_the_numbers() -> None:
    """An error without the sizes sends the user to the source."""
    with pytest.raises(ValueError, match=r"num_heads=10 .* num_kv_heads=4"):
        split_heads("ParallelAttention", 10, 4, 2)
    with pytest.raises(ValueError, match=r"3 shard sizes \(1, 2, 3\) for a group of 2 ranks"):
        checked_shards("op", "out_features", 6, 2, None, (1, 2, 3))
    with pytest.raises(ValueError, match=r"\(1, 2\) cover 3, but out_features=6"):
        checked_shards("op", "out_features", 6, 2, None, (1, 2))
    with pytest.raises(ValueError, match="negative"):
        checked_shards("op", "out_features", 6, 2, None, (7, -1))
