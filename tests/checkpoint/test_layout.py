"""Arithmetic of layouts: what a rank takes of the whole, and who counts where ranks overlap."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from interlace.modules import ColumnParallelLinear, RowParallelLinear, Shards, layouts_of
from interlace.modules.layout import ParameterLayout
from tests.distributed import run_distributed

PACKED = ParameterLayout((14, 2), 0, (((0, 4), (8, 10), (11, 13)), ((4, 8), (9, 11), (12, 14)), ()), "g")


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_packed_layout_takes_its_pieces_in_order(rank: int) -> None:
    """Pieces in the order of the local tensor, an empty shard as an empty tensor of the right rank."""
    whole = torch.arange(28).view(14, 2)
    local = PACKED.take(whole, rank)
    assert tuple(local.shape) == PACKED.local_shape(rank)
    rows = [i for start, end in PACKED.ranges(rank) for i in range(start, end)]
    assert local[:, 0].tolist() == [2 * row for row in rows]


def test_the_first_holder_owns_what_several_ranks_hold() -> None:
    """Owned slices cover the whole once; places point at the same rows in the local tensor."""
    whole = torch.arange(28).view(14, 2)
    rebuilt = torch.full_like(whole, -1)
    for rank in range(3):
        local = PACKED.take(whole, rank)
        for place, (start, end) in PACKED.owned(rank):
            assert (rebuilt[start:end] == -1).all(), "a row counts twice"
            rebuilt[start:end] = local[place : place + end - start]
    assert torch.equal(rebuilt, whole)
    assert PACKED.overlapping
    inner = ParameterLayout((10,), 0, (((3, 5),), ((0, 10),)), "g")
    assert inner.owned(1) == ((0, (0, 3)), (5, (5, 10))), "a slice with a hole"


def test_a_part_is_not_taken_for_the_whole() -> None:
    """Catches a shard that is cut a second time."""
    with pytest.raises(ValueError, match=r"expected a whole parameter of shape \[14, 2\], got \[7, 2\]"):
        PACKED.take(torch.zeros(7, 2), 0)


def _layouts(rank: int, world_size: int) -> None:
    shared = Shards(6, tuple(((min(r, 4), min(r, 4) + 2),) for r in range(world_size)))
    model = nn.Sequential(
        ColumnParallelLinear(4, 7),
        RowParallelLinear(7, 4),
        nn.LayerNorm(4),
        ColumnParallelLinear(4, 6, shards=shared),
    )
    model.append(model[0])
    layouts = layouts_of(model)
    assert sorted(layouts) == ["0.bias", "0.weight", "1.weight", "3.bias", "3.weight", "4.bias", "4.weight"]
    for name, param in model.named_parameters():
        if name in layouts:
            assert layouts[name].local_shape(rank) == tuple(param.shape), name
    assert layouts["0.weight"].shape == (7, 4) and layouts["1.weight"].dim == 1
    assert layouts["3.weight"].pieces[rank] == ((min(rank, 4), min(rank, 4) + 2),)


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_every_cut_parameter_of_a_model_has_a_layout(world_size: int) -> None:
    """A row bias is replicated and has none; a module used twice has it under both names."""
    run_distributed(world_size, _layouts)
