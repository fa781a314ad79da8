"""DTensor parameters: torch's styles, and fully_shard on the data-parallel axis over a split model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import utils
from torch.optim import AdamW

import interlace
from interlace.checkpoint import distributed_state_dict, full_grads, full_state_dict, load_full_state_dict
from tests.checkpoint.models import IDS, Net, assert_shards, split
from tests.distributed import run_distributed

# DTensor's caches keep a mesh and its groups for good, so these run in workers of their own.
OWN_WORKERS = {"TORCH_DISTRIBUTED_DEBUG": "OFF"}


def _assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def _sharded(whole: Net, mesh: DeviceMesh) -> Net:
    model = split(whole, 2, mesh["tp"])
    for block in model.layers:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def _backward(*models: nn.Module) -> None:
    for model in models:
        model.zero_grad()
        model(IDS).square().mean().backward()


def _everything(rank: int, world_size: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = Net().double()
    model = _sharded(whole, mesh)
    assert isinstance(model.layers[0].q.weight, DTensor)
    _assert_equal(full_state_dict(model), whole.state_dict())
    assert bool(full_state_dict(model, rank0_only=True)) == (dist.get_rank() == 0)
    _backward(whole, model)
    grads = full_grads(model)
    for name, param in whole.named_parameters():
        torch.testing.assert_close(grads[name], param.grad, rtol=1e-9, atol=1e-12, msg=name)
    for norm_type in (2.0, float("inf")):
        for clip in (utils.clip_grad_norm_, interlace.clip_grad_norm_):
            _backward(whole, model)
            expected = utils.clip_grad_norm_(whole.parameters(), 1e-3, norm_type)
            found = clip(model.parameters(), 1e-3, norm_type)
            found = found.full_tensor() if isinstance(found, DTensor) else found
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
            for name, grad in full_grads(model).items():
                expected_grad = whole.get_parameter(name).grad
                torch.testing.assert_close(grad, expected_grad, rtol=1e-6, atol=1e-12, msg=name)
    _mixed(mesh)
    _checkpoints(rank, mesh, whole, model, Path(folder))
    _styles(mesh)


def _mixed(mesh: DeviceMesh) -> None:
    """Only the blocks under fully_shard: DTensors and plain shards, split and not, in one norm."""
    whole = Net().double()
    model = split(whole, 2, mesh["tp"])
    fully_shard(model.layers[1], mesh=mesh["dp"])
    _backward(whole, model)
    expected = utils.clip_grad_norm_(whole.parameters(), 1e-3)
    torch.testing.assert_close(interlace.clip_grad_norm_(model, 1e-3), expected, rtol=1e-9, atol=0)
    grads = full_grads(model)
    for name, param in whole.named_parameters():
        torch.testing.assert_close(grads[name], param.grad, rtol=1e-6, atol=1e-12, msg=name)


def _checkpoints(rank: int, mesh: DeviceMesh, whole: Net, model: Net, folder: Path) -> None:
    optimizers = [AdamW(net.parameters(), lr=0.01) for net in (whole, model)]
    for _ in range(2):
        _backward(whole, model)
        for optimizer in optimizers:
            optimizer.step()
    state = full_state_dict(model)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-9, msg=name)
    dcp.save(distributed_state_dict(model, optimizers[1]), checkpoint_id=folder / "2x2")
    flat = split(Net(9).double(), 4)
    flat_optimizer = AdamW(flat.parameters(), lr=0.5)
    dcp.load(distributed_state_dict(flat, flat_optimizer), checkpoint_id=folder / "2x2")
    assert_shards(flat, state, rank)
    dcp.save(distributed_state_dict(flat, flat_optimizer), checkpoint_id=folder / "4")
    again = _sharded(Net(9).double(), mesh)
    again_optimizer = AdamW(again.parameters(), lr=0.5)
    dcp.load(distributed_state_dict(again, again_optimizer), checkpoint_id=folder / "4")
    _assert_equal(full_state_dict(again), state)
    for found, expected in zip(again_optimizer.state.values(), optimizers[1].state.values(), strict=True):
        for key, value in expected.items():
            pair = [t.to_local() if isinstance(t, DTensor) else t for t in (found[key], value)]
            assert torch.equal(*pair), key
    assert again_optimizer.param_groups[0]["lr"] == 0.01
    loaded = _sharded(Net(8).double(), mesh)
    load_full_state_dict(loaded, state)
    _assert_equal(full_state_dict(loaded), state)
    with torch.device("meta"):
        lost = _sharded(Net(), mesh)
    with pytest.raises(ValueError, match=r"under fully_shard is on the meta device; call model.to_empty"):
        load_full_state_dict(lost, state)


def _styles(mesh: DeviceMesh) -> None:
    torch.manual_seed(1)
    whole = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6))
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    load_full_state_dict(model, whole.state_dict())
    _assert_equal(full_state_dict(model), whole.state_dict())


def test_everything_holds_for_dtensors_and_fsdp(tmp_path: Path) -> None:
    """State, gradients, norms, whole and distributed checkpoints of fully_shard (2) over shards (2)."""
    run_distributed(4, _everything, str(tmp_path), env=OWN_WORKERS, timeout=120)
