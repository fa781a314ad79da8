"""Local state dicts, copies, pickles and moving averages of a split model."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from interlace.checkpoint import full_state_dict
from tests.checkpoint.models import IDS, Net, assert_shards, split
from tests.distributed import run_distributed, subgroup


def _stored(value: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def _round_trip(rank: int, world_size: int) -> None:
    whole = Net()
    model, other = split(whole, world_size), split(Net(8), world_size)
    other.load_state_dict(torch.load(_stored(model.state_dict())))
    assert_shards(other, whole.state_dict(), rank)
    assert other.head.weight is other.embed.weight
    before = copy.deepcopy(other.state_dict())
    if world_size > 1:
        with pytest.raises(RuntimeError, match="load_full_state_dict") as told:
            other.load_state_dict(whole.state_dict())
        text = str(told.value)
        assert "layers.0.q.weight: got the whole parameter [18, 5]" in text and "size mismatch" not in text, (
            text
        )
        assert "Missing" not in text and "norm" not in text, text
        pair = subgroup([0, 1])
        if rank < 2:
            swapped = copy.deepcopy(split(Net(9), 2, pair).state_dict())
            expected = "another rank's or another world" if world_size > 2 else None
            if expected:
                with pytest.raises(RuntimeError, match=expected):
                    other.load_state_dict(swapped)
    for name, value in before.items():
        if "q.weight" in name:
            assert torch.equal(value, other.state_dict()[name]), "a wrong shard was copied"


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_shards_go_through_a_local_state_dict_and_wholes_do_not(world_size: int) -> None:
    """The error says what to call instead, for each parameter; nothing wrong is copied."""
    run_distributed(world_size, _round_trip)


def _shard(rank: int, world_size: int) -> io.BytesIO:
    return _stored(split(Net(), world_size).state_dict())


def _foreign_shard(rank: int, world_size: int, shards: list[io.BytesIO]) -> None:
    model = split(Net(8), world_size)
    before = model.layers[0].gate_up.weight.detach().clone()
    with pytest.raises(
        RuntimeError, match=r"layers.0.gate_up.weight: got slices .* of dim 0, expected slices"
    ):
        model.load_state_dict(torch.load(shards[1 - rank]))
    assert torch.equal(model.layers[0].gate_up.weight, before)
    model.load_state_dict(torch.load(shards[rank]))


def test_the_shard_of_another_rank_is_refused_though_its_shape_fits() -> None:
    """Files mixed up between ranks would load without a word and compute nonsense."""
    run_distributed(2, _foreign_shard, run_distributed(2, _shard))


def _copies(rank: int, world_size: int) -> None:
    whole = Net().double()  # AdamW makes steps out of rounding where a gradient is zero (key biases)
    model = split(whole, world_size)
    expected = whole(IDS)
    loaded = torch.load(_stored(model), weights_only=False)
    for other in (copy.deepcopy(model), loaded):
        torch.testing.assert_close(other(IDS), expected)
        other.layers[0].q.weight.data.add_(1)
        assert_shards(model, whole.state_dict(), rank)
        assert other.head.weight is other.embed.weight
    nets = (whole, model)
    averages = [AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True) for net in nets]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.1) for net in nets]
    for _ in range(2):
        for net, average, optimizer in zip(nets, averages, optimizers, strict=True):
            optimizer.zero_grad()
            net(IDS).square().mean().backward()
            optimizer.step()
            average.update_parameters(net)
    found = full_state_dict(averages[1])
    for name, value in averages[0].state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)
    again = torch.optim.AdamW(model.parameters(), lr=0.3)
    again.load_state_dict(torch.load(_stored(optimizers[1].state_dict())))
    for net, optimizer in ((whole, optimizers[0]), (model, again)):
        optimizer.zero_grad()
        net(IDS).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(model(IDS), whole(IDS), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world_size", [2, 4])
def test_copies_pickles_averages_and_optimizers(world_size: int) -> None:
    """A copy shares nothing with the model; an average and a reloaded optimizer train as the unsplit ones."""
    run_distributed(world_size, _copies)
