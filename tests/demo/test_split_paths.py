"""The plain-torch twins of the parallel linears: the baseline of the demo must be right, and share the shards."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed import run_distributed


def model(world_size: int) -> tuple[nn.Sequential, nn.Sequential]:
    """An unsplit model and the same split, with sizes that no world of 2 or 3 divides."""
    from interlace.modules import ColumnParallelLinear, RowParallelLinear

    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(10, 7), nn.GELU(), nn.Linear(7, 5), nn.Linear(5, 11)).requires_grad_(
        False
    )
    split = nn.Sequential(
        ColumnParallelLinear.from_linear(whole[0]),
        nn.GELU(),
        RowParallelLinear.from_linear(whole[2]),
        ColumnParallelLinear.from_linear(whole[3], gather_output=True),
    )
    return whole, split.requires_grad_(False)


def compare_twins(rank: int, world_size: int) -> None:
    from interlace.bench.split_paths import split_paths

    whole, split = model(world_size)
    shards = {parameter.data_ptr() for parameter in split.parameters()}
    x = torch.randn(3, 10)
    dist.broadcast(x, 0)
    paths = {path.name: path for path in split_paths(split)}
    assert list(paths) == ["gloo", "reference", "interlace"]
    for path in paths.values():
        with path.backend():
            torch.testing.assert_close(path.model(x), whole(x))
            assert path.compute_only(x).shape == (3, 11)
    for name in ("gloo", "reference"):
        assert {p.data_ptr() for p in paths[name].model.parameters()} == shards
        assert {p.data_ptr() for p in paths[name].compute_only.parameters()} == shards


def sum_of_parts(rank: int, world_size: int) -> None:
    from interlace.bench.split_paths import split_paths

    whole, split = model(world_size)
    x = torch.randn(3, 10)
    dist.broadcast(x, 0)
    for path in split_paths(split):
        with path.backend():
            part = path.compute_only[:3](x) - whole[2].bias
        dist.all_reduce(part)
        torch.testing.assert_close(part + whole[2].bias, whole[:3](x))


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_path_computes_the_unsplit_model_over_the_same_shards(world_size: int):
    """Catches a baseline that is fast because it is wrong, a bias added by every rank, a copied shard."""
    run_distributed(world_size, compare_twins)


@pytest.mark.parametrize("world_size", [2, 3])
def test_compute_only_leaves_out_the_sum_and_nothing_else(world_size: int):
    """Catches a compute-only twin that skips work, so that communication looks dearer than it is."""
    run_distributed(world_size, sum_of_parts)
