"""Routed experts and latent attention where the sequence is cut between the blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from interlace.families.catalogue import FAMILIES, build, inputs
from interlace.families.check import LIMIT, loss_of, worst_gradient
from interlace.parallelize import parallelize
from tests.distributed import run_distributed

pytest.importorskip("transformers")
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("mixtral", {}),
    ("qwen3_moe", {}),
    ("gpt_oss", {}),
    ("deepseek_v3", {}),
    ("deepseek_v3", {"q_lora_rank": None, "first_k_dense_replace": 0}),
)


def _compare(rank: int, world_size: int) -> None:
    for name, options in CASES:
        family = FAMILIES[name]
        whole = build(family, **options)
        split = parallelize(build(family, **options), None, sequence_parallel=True)
        expected, loss = loss_of(whole, inputs(family))
        loss.backward()
        logits, loss = loss_of(split, inputs(family))
        loss.backward()
        error = ((logits - expected).norm() / expected.norm()).item()
        assert error < LIMIT, f"{name} {options}: logits {error:.1e}"
        gradient = worst_gradient(whole, split, rank)
        assert gradient < LIMIT, f"{name} {options}: gradients {gradient:.1e}"


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_experts_and_latents_see_the_whole_sequence(world_size: int) -> None:
    """7 tokens: uneven shards. A router has every token on every rank, so a sum of its gradients would be wrong."""
    run_distributed(world_size, _compare)


def _refused(rank: int, world_size: int) -> None:
    family = FAMILIES["qwen2_moe"]
    model = build(family)
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match=r"shared experts of .* are not simply added"):
        parallelize(model, None, sequence_parallel=True)
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert torch.isfinite(model(**inputs(family)).logits).all()


def test_gated_shared_experts_are_refused_where_the_sequence_is_cut() -> None:
    """Their linears would gather a sequence that is whole already."""
    run_distributed(2, _refused)
