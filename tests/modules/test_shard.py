"""Arithmetic of shards and heads: pure functions, no processes."""

from __future__ import annotations

import pytest
import torch

from interlace.modules.layout import take
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


@pytest.mark.parametrize("world_size", range(1, 7))
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (9, 3), (4, 1), (8, 2)])
def test_packed_blocks_keep_the_slices_of_each(heads: int, kv_heads: int, world_size: int) -> None:
    """q|k|v in one tensor: a rank must hold its own heads of each, in that order, not a third of the rows."""
    layout = split_heads("test", heads, kv_heads, world_size)
    packed = Shards.packed([layout.query, layout.key_value, layout.key_value])
    rows = torch.arange(packed.total)
    blocks = rows.split([heads, kv_heads, kv_heads])
    cuts = (layout.query, layout.key_value, layout.key_value)
    held = [0] * packed.total
    for rank in range(world_size):
        mine = take(rows, 0, packed.ranges(rank))
        parts = [block[slice(*cut.bounds(rank))] for block, cut in zip(blocks, cuts, strict=True)]
        assert torch.equal(mine, torch.cat(parts)) and packed.sizes[rank] == mine.numel()
        for row in mine.tolist():
            held[row] += 1
    assert all(held)
    shared = [row for start, end in packed.shared_ranges() for row in range(start, end)]
    assert shared == [row for row, holders in enumerate(held) if holders > 1]
    assert packed.overlapping == bool(shared)


def test_pieces_that_touch_are_one() -> None:
    """One rank holds everything in one slice, whatever it is packed of; several slices have no bounds."""
    whole = Shards.packed([Shards.chunk(4, 1), Shards.chunk(2, 1)])
    assert whole == Shards.chunk(6, 1) and whole.is_chunk
    two = Shards.packed([Shards.chunk(4, 2), Shards.chunk(2, 2)])
    assert two.pieces == (((0, 2), (4, 5)), ((2, 4), (5, 6)))
    assert two.scaled(2).pieces[1] == ((4, 8), (10, 12))
    with pytest.raises(ValueError, match="holds 2 slices"):
        two.bounds(0)


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
