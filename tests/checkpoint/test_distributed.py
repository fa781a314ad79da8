"""torch.distributed.checkpoint: save split over a ranks, load split over b; model, optimizer, plain torch both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from interlace.checkpoint import distributed_state_dict, materialise
from interlace.modules import layouts_of
from tests.checkpoint.models import IDS, Net, assert_shards, own, split
from tests.distributed import run_distributed


def _train(model: nn.Module, optimizer: Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model((IDS + step) % 11).square().mean().backward()
        optimizer.step()


def _adam(model: nn.Module, lr: float = 0.05, **options: Any) -> AdamW:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return AdamW(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=lr, amsgrad=True, **options
    )


def _save(rank: int, world_size: int, folder: str) -> None:
    """Trained unsplit: what is saved is known. The state of the split optimizer is this rank's part of it."""
    whole = Net().double()
    optimizer = _adam(whole)
    _train(whole, optimizer)
    for options in ({"foreach": True}, {"fused": True}):
        model = split(whole, world_size)
        mine = _adam(model, **options)
        _fill(mine, model, optimizer, whole, rank)
        path = Path(folder) / f"{next(iter(options))}{world_size}"
        dcp.save(distributed_state_dict(model, mine), checkpoint_id=path)
    if world_size == 1:
        names = ("model", "optimizer")
        dcp.save(
            dict(zip(names, get_state_dict(whole, optimizer), strict=True)),
            checkpoint_id=Path(folder) / "torch",
        )


def _fill(mine: Optimizer, model: nn.Module, theirs: Optimizer, whole: nn.Module, rank: int) -> None:
    layouts = layouts_of(model)
    mine.step()  # makes the state: there are no gradients
    for (name, param), full in zip(model.named_parameters(), whole.parameters(), strict=True):
        for key, value in theirs.state[full].items():
            part = own(value, layouts.get(name), rank) if value.dim() else value
            mine.state[param][key] = part.detach().clone()
    for group, other in zip(mine.param_groups, theirs.param_groups, strict=True):
        group["lr"] = other["lr"]


def _load(rank: int, world_size: int, folder: str, saved: list[str]) -> None:
    whole = Net().double()
    optimizer = _adam(whole)
    _train(whole, optimizer)
    params = dict(whole.named_parameters())
    for name in saved:
        model = split(Net(9).double(), world_size)
        mine = _adam(model, lr=0.9, foreach=name.startswith("foreach"))
        dcp.load(distributed_state_dict(model, mine), checkpoint_id=Path(folder) / name)
        assert_shards(model, whole.state_dict(), rank)
        assert torch.equal(model.layers[0].scale, whole.layers[0].scale)
        layouts = layouts_of(model)
        for key, param in model.named_parameters():
            for what, value in optimizer.state[params[key]].items():
                expected = own(value, layouts.get(key), rank) if value.dim() else value
                assert torch.equal(mine.state[param][what], expected), f"{name}: {what} of {key}"
        assert [g["lr"] for g in mine.param_groups] == [0.05, 0.05] and mine.param_groups[1][
            "weight_decay"
        ] == 0
    assert len(mine.state) == len(list(model.parameters()))
    _train(model, mine)
    _train(whole, optimizer)
    for key, param in model.named_parameters():
        expected = own(params[key].detach(), layouts.get(key), rank)
        torch.testing.assert_close(param.detach(), expected, rtol=1e-7, atol=1e-9, msg=f"trained on: {key}")


def _load_into_torch(rank: int, world_size: int, folder: str, saved: list[str]) -> None:
    whole = Net().double()
    _train(whole, _adam(whole))
    for name in saved:
        other = Net(9).double()
        state = dict(zip(("model", "optimizer"), get_state_dict(other, _adam(other)), strict=True))
        dcp.load(state, checkpoint_id=Path(folder) / name)
        for key, value in whole.state_dict().items():
            assert torch.equal(state["model"][key], value), f"{name}: {key}"


def test_any_split_loads_into_any_other(tmp_path: Path) -> None:
    """4 x 4 splits with shared kv heads, packed and empty shards; AdamW's moments; on into and out of plain torch."""
    saved = []
    for world_size in (1, 2, 3, 4):
        run_distributed(world_size, _save, str(tmp_path))
        saved += [f"foreach{world_size}", f"fused{world_size}"]
    for world_size in (1, 2, 3, 4):
        run_distributed(world_size, _load, str(tmp_path), [*saved[world_size % 2 :: 2], "torch"])
    run_distributed(1, _load_into_torch, str(tmp_path), saved[::2])


def _details(rank: int, world_size: int, folder: str) -> None:
    model = split(Net(), world_size)
    state = distributed_state_dict(model)
    assert list(state) == list(Net().state_dict())
    assert state["layers.0.k.weight"].shape == (9, 5), "shapes are those of the whole"
    with pytest.raises(RuntimeError, match=r"goes to torch.distributed.checkpoint only"):
        state["layers.0.k.weight"] + 1
    with torch.device("meta"):
        lost = split(Net(), world_size)
    with pytest.raises(ValueError, match=r"embed.weight is on the meta device; call .*materialise"):
        distributed_state_dict(lost)
    dcp.save(state, checkpoint_id=Path(folder) / "plain")
    future = dcp.async_save(state, checkpoint_id=Path(folder) / "async", process_group=dist.group.WORLD)
    future.result()
    for block in lost.layers:
        block.cached = torch.ones(2)
    for name in ("plain", "async"):
        dcp.load(distributed_state_dict(materialise(lost)), checkpoint_id=Path(folder) / name)
        assert_shards(lost, Net().state_dict(), rank)
        for param in lost.parameters():
            param.data.zero_()
    fresh = AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    before = [p.detach().clone() for p in model.parameters()]
    found = distributed_state_dict(model, fresh)["optimizer"].state_dict()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)), "a step was made"
    assert (
        all(v["step"] == 0 for v in found["state"].values()) and fresh.param_groups[0]["weight_decay"] == 0.5
    )
    assert all(p.grad is None for p in model.parameters())
    momentum = SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert (
        "momentum_buffer"
        in distributed_state_dict(model, momentum)["optimizer"].state_dict()["state"]["embed.weight"]
    )
    with pytest.raises(ValueError, match=r"cannot be put together for another split"):
        distributed_state_dict(model, Adafactor([model.layers[0].q.weight]))["optimizer"].state_dict()
    with pytest.raises(ValueError, match=r"has a parameter \[11, 5\] that the model has not"):
        distributed_state_dict(model, SGD(Net().parameters(), lr=1.0))["optimizer"].state_dict()


def test_what_the_state_dict_is_and_is_not(tmp_path: Path) -> None:
    """Names and shapes of the whole; asynchronous saves; a fresh optimizer is left as it is; misuse is told."""
    run_distributed(3, _details, str(tmp_path))
