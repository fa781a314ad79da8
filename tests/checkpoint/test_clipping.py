"""Norms of gradients: that of the unsplit model, for torch's own function and for ours."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import utils
from torch.nn.utils import clip_grad, clip_grad_norm_

from interlace.modules import clipping
from tests.checkpoint.models import IDS, Net, split
from tests.distributed import run_distributed


def _gradients(*models: nn.Module) -> None:
    for model in models:
        model.zero_grad()
        model(IDS).square().sum().backward()


def _norms(rank: int, world_size: int) -> None:
    whole = Net()
    model = split(whole, world_size)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    variants = {
        "split": model,
        "copied": copy.deepcopy(model),
        "pickled": torch.load(stored, weights_only=False),
    }
    for name, net in variants.items():
        for norm_type in (2.0, 1.0, 3.0, float("inf")) if net is model else (2.0,):
            for clip in (clip_grad_norm_, clipping.clip_grad_norm_):
                _gradients(whole, net)
                expected = clip_grad_norm_(whole.parameters(), 0.5, norm_type)
                found = clip(net.parameters(), 0.5, norm_type)
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=0, msg=f"{name} {norm_type}")
                torch.testing.assert_close(net.head.weight.grad, whole.head.weight.grad, rtol=1e-4, atol=1e-7)
                everyone = [torch.empty_like(found) for _ in range(world_size)]
                dist.all_gather(everyone, found)
                assert all(torch.equal(other, found) for other in everyone), "ranks would drift apart"
    _gradients(whole, model)
    some = list(model.layers[0].parameters())
    expected = utils.get_total_norm([p.grad for p in whole.layers[0].parameters()])
    torch.testing.assert_close(utils.get_total_norm([p.grad for p in some]), expected, rtol=1e-5, atol=0)
    assert clipping.clip_grad_norm_(model, 1e9) == clipping.clip_grad_norm_(model.parameters(), 1e9)
    assert utils.get_total_norm([torch.ones(4)]) == 2.0 and utils.get_total_norm([]) == 0.0
    if world_size > 1:  # an unsplit model is torch's own business
        with pytest.raises(ValueError, match="norm_type=0"):
            clip_grad_norm_(model.parameters(), 1.0, 0)
    if rank == 0:
        model.layers[1].q.weight.grad[0, 0] = float("nan")
    for norm_type in (2.0, float("inf")):
        with pytest.raises(RuntimeError, match=r"is nan, so they cannot be clipped|non-finite"):
            clip_grad_norm_(model.parameters(), 1.0, norm_type, error_if_nonfinite=True)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_norm_is_that_of_the_unsplit_model(world_size: int) -> None:
    """torch's function would give each rank a norm of its own; copies and unpickled models count too."""
    run_distributed(world_size, _norms)


def _low_precision(rank: int, world_size: int) -> None:
    whole = Net().bfloat16()
    model = split(whole, world_size)
    _gradients(whole, model)
    expected = utils.get_total_norm([p.grad.double() for p in whole.parameters()]).item()
    assert abs(clip_grad_norm_(model.parameters(), 1.0).item() / expected - 1) < 0.02


def test_bf16_gradients_have_an_fp32_norm() -> None:
    """bf16 has 8 bits: the gradients themselves differ by about 1 %, their norm must not lose more."""
    run_distributed(2, _low_precision)


def test_torch_gets_its_own_norm_back() -> None:
    """The replacement is one, can be removed, and stays removed until it is asked for."""
    own = clipping._torchs
    clipping.install_total_norm()
    clipping.install_total_norm()
    replaced = clip_grad._get_total_norm
    assert replaced is not own and utils.get_total_norm is replaced
    clipping.restore_total_norm()
    try:
        assert clip_grad._get_total_norm is own and utils.get_total_norm is own
        clipping.install_total_norm()
        assert clip_grad._get_total_norm is own
    finally:
        clipping.install_total_norm(again=True)
    assert clip_grad._get_total_norm is replaced


def test_a_replacement_by_others_is_left_alone_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two packages that wrap one another would undo each other's removal."""
    clipping.restore_total_norm()
    monkeypatch.setattr(clip_grad, "_get_total_norm", lambda *args, **kwargs: torch.zeros(()))
    with pytest.warns(UserWarning, match="replaced by another package"):
        clipping.install_total_norm(again=True)
    monkeypatch.undo()
    clipping.install_total_norm(again=True)
