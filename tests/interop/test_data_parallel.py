"""Split models under FSDP2 and DDP on the other axis of a mesh: trained as the unsplit model on all of the data."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from interlace.modules.layout import layouts_of
from interlace.parallelize import parallelize
from tests.distributed import run_distributed
from tests.interop.models import ids, llama, loss_of
from tests.parallelize.models import assert_near

STEPS, MICRO_BATCHES = 3, 2


def _mesh() -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))


def _batch(step: int, micro: int, replica: int) -> Tensor:
    return ids(step * 10 + micro * 2 + replica)


def _train_whole(model: nn.Module) -> tuple[nn.Module, list[float]]:
    """One process with the data of both replicas."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO_BATCHES):
            parts = [loss_of(model, _batch(step, micro, replica)) for replica in range(2)]
            (sum(parts) / 2 / MICRO_BATCHES).backward()
            losses += [part.item() for part in parts]
        optimizer.step()
    return model, losses


def _train_replica(model: nn.Module, replica: int) -> list[float]:
    """The same steps on a replica's data; gradients are averaged with the last micro batch only."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO_BATCHES):
            last = micro == MICRO_BATCHES - 1
            silent = contextlib.nullcontext()
            if isinstance(model, DistributedDataParallel):
                silent = silent if last else model.no_sync()
            else:
                model.set_requires_gradient_sync(last)
            with silent:
                loss = loss_of(model, _batch(step, micro, replica))
                (loss / MICRO_BATCHES).backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


def _whole_value(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _replicas(rank: int, world_size: int, wrapper: str, sequence_parallel: bool) -> None:
    mesh = _mesh()
    replica, tp_rank = mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()
    base = llama(4, 1 if sequence_parallel else 2)
    whole, expected = _train_whole(copy.deepcopy(base))
    split = parallelize(base, mesh["tp"], sequence_parallel=sequence_parallel)
    layouts = layouts_of(split)
    if wrapper == "ddp":
        model = DistributedDataParallel(split, process_group=mesh["dp"].get_group())
    else:
        for layer in split.model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        model = fully_shard(split, mesh=mesh["dp"])
    losses = _train_replica(model, replica)
    assert_near("losses", torch.tensor(losses), torch.tensor(expected[replica::2]))
    compared = 0
    for name, param in split.named_parameters():
        want = whole.get_parameter(name)
        for what, found, value in (("", param, want), (".grad", param.grad, want.grad)):
            value = layouts[name].take(value, tp_rank) if name in layouts else value
            assert_near(f"{name}{what}", _whole_value(found.detach()), value.detach())
        compared += name in layouts
    assert compared >= 14, f"{compared} cut parameters were compared"


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("wrapper", ["fsdp2", "ddp"])
def test_steps_of_adamw_on_two_axes_equal_the_unsplit_model(wrapper: str, sequence_parallel: bool) -> None:
    """Catches wrappers that take shards for replicas, and gradients that are complete only after a hook of ours."""
    run_distributed(4, _replicas, wrapper, sequence_parallel, timeout=180.0)


def _mixed_precision(rank: int, world_size: int) -> None:
    mesh = _mesh()
    base = llama(4, 2).float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    split = parallelize(copy.deepcopy(base), mesh["tp"])
    layouts = layouts_of(split)
    for layer in split.model.layers:
        fully_shard(layer, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(split, mesh=mesh["dp"], mp_policy=policy)
    loss_of(split, ids()).backward()
    half = copy.deepcopy(base).bfloat16()
    for model in (base, half):
        loss_of(model, ids()).backward()
    ours, theirs = 0.0, 0.0
    for name, param in split.named_parameters():
        assert param.dtype == torch.float32 and param.grad.dtype == torch.float32, name
        exact, rounded = (m.get_parameter(name).grad.float() for m in (base, half))
        if name in layouts:
            exact, rounded = (layouts[name].take(g, mesh["tp"].get_local_rank()) for g in (exact, rounded))
        ours += (_whole_value(param.grad) - exact).square().sum().item()
        theirs += (rounded - exact).square().sum().item()
    assert 0 < ours <= 1.5**2 * theirs, f"squared error {ours}, of the unsplit model in bf16 {theirs}"


def test_a_mixed_precision_policy_computes_in_bf16_and_reduces_in_fp32() -> None:
    """Bound: 1.5 x the error of the unsplit model in bf16, over all gradients of a rank."""
    run_distributed(4, _mixed_precision, timeout=120.0)


def _wrong_group(rank: int, world_size: int) -> None:
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))
    split = parallelize(llama(4, 2, num_hidden_layers=1, vocab_size=62), mesh["tp"])
    model = DistributedDataParallel(
        split
    )  # over all four ranks: the shards of two are those of the other two now
    with pytest.raises(ValueError, match=r"over ranks \[., .\], which hold shards of one split model"):
        loss_of(model, ids())


def test_ddp_over_the_ranks_that_hold_shards_is_refused() -> None:
    """It takes shards of equal shapes for replicas: no shape tells, and every number after that is wrong."""
    run_distributed(4, _wrong_group)
