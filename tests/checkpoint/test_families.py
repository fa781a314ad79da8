"""Families whose parameters are packed, transposed, stacked or renamed: whole again, and from the hub's own files."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.checkpoint import full_grads, full_state_dict, load_full_state_dict
from interlace.families.catalogue import FAMILIES, build, inputs
from interlace.families.check import loss_of
from tests.distributed import run_distributed

# packed qkv and gate|up, interleaved qkv, Conv1D, stacked experts (gate|up), latent attention, renamed modules
NAMES = ("phi3", "gpt_neox", "gpt2", "mixtral", "deepseek_v3", "gpt_oss", "t5", "vit")


def _family(rank: int, world_size: int, folder: str, names: tuple[str, ...]) -> None:
    for name in names:
        family = FAMILIES[name]
        whole = build(family).eval()
        path = Path(folder) / name
        if rank == 0:
            whole.save_pretrained(path)  # in the form of the files on the hub
        model = interlace.parallelize(copy.deepcopy(whole), None)
        found, expected = full_state_dict(model), whole.state_dict()
        assert list(found) == list(expected), name
        for key, value in expected.items():
            assert torch.equal(found[key], value), f"{name}: {key}"
        arguments = inputs(family)
        for net in (whole, model):
            loss_of(net, arguments)[1].backward()
        grads = full_grads(model)
        for key, param in whole.named_parameters():
            assert (key in grads) == (param.grad is not None), f"{name}: {key}"
            if param.grad is not None:
                error = (grads[key] - param.grad).norm() / param.grad.norm().clamp_min(
                    1e-2
                )  # key biases: zero but for rounding
                assert error < 1e-3, f"{name}: gradient of {key} is off by {error:.1e}"
        norms = [torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0) for net in (whole, model)]
        torch.testing.assert_close(norms[1], norms[0], rtol=1e-4, atol=0, msg=name)
        dist.barrier()
        with torch.device("meta"):
            lost = type(whole)(whole.config).eval()
        result = load_full_state_dict(interlace.parallelize(lost, None), path)
        assert not result.missing_keys and not result.unexpected_keys, name
        loaded = full_state_dict(lost)
        for key, value in expected.items():
            assert torch.equal(loaded[key], value), f"{name} from files: {key}"


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_kind_of_parameter_is_whole_again(world_size: int, tmp_path: Path) -> None:
    """State, gradients and their norm; a checkpoint in the hub's form is read in slices into a meta model."""
    names = NAMES if world_size == 2 else ("phi3", "gpt2", "mixtral")
    run_distributed(world_size, _family, str(tmp_path), names, timeout=120)


def _refused(rank: int, world_size: int, folder: str) -> None:
    whole = build(FAMILIES["mixtral"]).eval()
    state = {key: value for key, value in whole.state_dict().items() if "experts" not in key}
    for expert in range(whole.config.num_local_experts):
        for name in ("w1", "w2", "w3")[: 3 if expert else 2]:  # expert 0 lacks w3
            key = f"model.layers.0.block_sparse_moe.experts.{expert}.{name}.weight"
            shape = (whole.config.intermediate_size, whole.config.hidden_size)
            state[key] = torch.zeros(*(reversed(shape) if name == "w2" else shape))
    model = interlace.parallelize(whole, None)
    with pytest.raises(ValueError, match=r"experts of different number or size cannot be stacked"):
        load_full_state_dict(model, state)


def test_experts_that_lack_a_part_are_refused(tmp_path: Path) -> None:
    """A checkpoint cut short would shift every expert behind the gap."""
    run_distributed(2, _refused, str(tmp_path))
