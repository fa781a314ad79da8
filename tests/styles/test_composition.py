"""Styles under fully_shard, with optimizers and gradient clipping, and in distributed checkpoints."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.distributed import run_distributed
from tests.styles import model as tiny

EVEN = {"vocab": 24, "heads": 8, "kv_heads": 4}


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> Tensor:
    """One step on the mean over `batches`; returns the norm of the gradients before clipping."""
    optimizer.zero_grad()
    for ids in batches:
        (tiny.loss_of(model(ids)) / len(batches)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return tiny.whole_of(norm)


def _sharded(mesh: DeviceMesh) -> nn.Module:
    model = tiny.split(tiny.make(**EVEN), mesh["tp"], sequence_parallel=True)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def _two_axes(rank: int, world_size: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = _sharded(mesh)
    whole = tiny.make(**EVEN)
    optimizer, reference = _optimizer(model), _optimizer(whole)
    for step in range(3):
        batches = [tiny.ids_of(24, length=8, seed=10 * step + group) for group in range(2)]
        norm = _step(model, optimizer, [batches[mesh["dp"].get_local_rank()]])
        tiny.assert_near("norm", norm, _step(whole, reference, batches))
    named = dict(model.named_parameters())
    for name, param in whole.named_parameters():
        tiny.assert_near(name, named[name].full_tensor(), param, 1e-9)  # AdamW divides by the gradient's size
    _checkpoints(model, optimizer, whole, reference, folder)


def _checkpoints(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    whole: nn.Module,
    reference: torch.optim.Optimizer,
    folder: str,
) -> None:
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    batches = [tiny.ids_of(24, length=8, seed=5)]
    expected = _step(whole, reference, batches)
    for split in (True, False):  # over four ranks, over one
        other = tiny.make(**EVEN)
        if split:
            tiny.split(other, tiny.tp_mesh())
        with torch.no_grad():
            for param in other.parameters():
                param.zero_()
        again = _optimizer(other)
        weights, states = get_state_dict(other, again)
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
        set_state_dict(other, again, model_state_dict=weights, optim_state_dict=states)
        assert other.head.weight is other.embed.weight
        tiny.assert_near("norm after loading", _step(other, again, batches), expected, 1e-9)
        loaded = dict(other.named_parameters())
        for name, param in whole.named_parameters():
            tiny.assert_near(name, tiny.whole_of(loaded[name]).detach(), param, 1e-9)


def test_fully_shard_on_the_other_axis_trains_and_saves_like_the_unsharded_model() -> None:
    """Two data-parallel by two tensor-parallel ranks, clipped AdamW; then on from the checkpoint on 4 and on 1 rank,
    optimizer state included."""
    with tempfile.TemporaryDirectory() as folder:
        run_distributed(4, _two_axes, folder, timeout=120.0)


def _resharded(rank: int, world_size: int, folder: str) -> None:
    saved = tiny.make()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "tp"))
    model = tiny.split(copy.deepcopy(saved), mesh["tp"])
    dcp.save(model.state_dict(), checkpoint_id=str(Path(folder)))
    for load_mesh in (tiny.tp_mesh(), None):
        other = tiny.make()
        if load_mesh is not None:
            tiny.split(other, load_mesh)
        with torch.no_grad():
            for param in other.parameters():
                param.zero_()
        state = other.state_dict()
        dcp.load(state, checkpoint_id=str(Path(folder)))
        other.load_state_dict(state)
        for name, param in saved.named_parameters():
            assert torch.equal(tiny.whole_of(other.get_parameter(name)), param), name


def test_uneven_shards_saved_on_two_ranks_load_on_four_and_on_one() -> None:
    """Vocabulary 23 and hidden 18 do not divide by 4, and 23 does not by 2."""
    with tempfile.TemporaryDirectory() as folder:
        run_distributed(4, _resharded, folder)
