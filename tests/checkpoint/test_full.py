"""full_state_dict and full_grads against the unsplit model, for every kind of cut."""

from __future__ import annotations

import io

import pytest
import torch
from torch import Tensor, nn

import interlace
from interlace.checkpoint import full_grads, full_state_dict
from tests.checkpoint.models import IDS, Net, assert_shards, split
from tests.distributed import run_distributed


def _assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def _state(rank: int, world_size: int) -> None:
    whole = Net()
    model = split(whole, world_size)
    assert_shards(model, whole.state_dict(), rank)
    state = full_state_dict(model)
    _assert_equal(state, whole.state_dict())
    assert state["head.weight"] is state["embed.weight"], "untied"
    state["layers.0.norm.weight"].fill_(9)
    assert not (model.layers[0].norm.weight == 9).any(), "a view of the model"
    compiled = nn.ModuleDict({"inner": torch.compile(model.layers[0])})
    names = full_state_dict(compiled)
    assert {f"inner.{name}" for name in whole.layers[0].state_dict()} == set(names)
    only = full_state_dict(model, rank0_only=True, cpu_offload=True)
    if rank:
        assert only == {}
    else:
        _assert_equal(only, whole.state_dict())
        saved = io.BytesIO()
        torch.save(only, saved)
        saved.seek(0)
        Net(4).load_state_dict(torch.load(saved))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_whole_state_dict_comes_back(world_size: int) -> None:
    """Names, order, values, ties; 6 and 3 heads over 2 and 4 ranks, packed, uneven and empty shards."""
    run_distributed(world_size, _state)


def _grads(rank: int, world_size: int) -> None:
    whole = Net().double()
    model = split(whole, world_size)
    for net in (whole, model):
        net.head.weight.requires_grad_(True)
        net.layers[1].widen.weight.requires_grad_(False)
        net(IDS).square().sum().backward()
    expected = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    if rank == world_size - 1:
        model.layers[0].narrow.weight.grad = None if world_size > 2 else model.layers[0].narrow.weight.grad
    found = full_grads(model)
    assert list(found) == list(expected), set(found) ^ set(expected)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-10, atol=1e-12, msg=name)
    assert set(full_grads(model, rank0_only=True)) == (set() if rank else set(expected))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_gradients_of_the_whole_come_back(world_size: int) -> None:
    """Rows of several holders count once; a frozen weight has none; an empty shard may have none on its rank."""
    run_distributed(world_size, _grads)


def _packed(rank: int, world_size: int) -> None:
    whole = Net().requires_grad_(False)
    model = interlace.pack_weights(split(whole, world_size))
    _assert_equal(full_state_dict(model), whole.state_dict())
    changed = {name: value + 1 for name, value in whole.state_dict().items()}
    interlace.load_full_state_dict(model, changed)
    _assert_equal(full_state_dict(model), changed)


def test_packed_weights_are_whole_and_are_loaded() -> None:
    """A view of a packed weight is a copy: writing into it would be lost."""
    run_distributed(2, _packed)
