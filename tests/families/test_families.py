"""Every family of the catalogue, split: logits, the gradient of every parameter, greedy tokens of both caches."""

from __future__ import annotations

import pytest
import torch

from interlace.families.catalogue import FAMILIES, build, inputs, named
from interlace.families.check import LIMIT, check, loss_of, worst_gradient
from interlace.parallelize import parallelize
from tests.distributed import run_distributed

pytest.importorskip("transformers")
UNEVEN = ("llama", "gemma3", "phi3", "gpt2", "bloom", "t5", "whisper", "mixtral", "deepseek_v3", "gpt_oss")


def _check(rank: int, world_size: int, name: str) -> None:
    row = check(FAMILIES[name])
    assert row.passed, row.problem
    assert row.worlds == str(world_size)
    assert row.forward is not None and row.gradients is not None
    if FAMILIES[name].generates:
        assert row.dynamic is True
        assert row.static is (True if FAMILIES[name].static else None)
    assert row.split > 0.5, f"only {row.split:.0%} of the parameters are cut"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_on_two_ranks_is_the_unsplit_model(name: str) -> None:
    """6 heads and 3 key/value heads on 2 ranks: key/value groups are cut 2 + 1."""
    run_distributed(2, _check, name)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_on_four_ranks_is_the_unsplit_model(name: str) -> None:
    """More ranks than key/value heads, features that do not divide by 4: shared heads, uneven shards."""
    run_distributed(4, _check, name)


@pytest.mark.parametrize("name", UNEVEN)
def test_a_family_on_three_ranks_is_the_unsplit_model(name: str) -> None:
    """61 words and 20 or 56 features do not divide by 3; a sum over ranks in another order than of 2 or 4."""
    run_distributed(3, _check, name)


def _losing_a_sum(rank: int, world_size: int) -> tuple[float, float]:
    family = FAMILIES["qwen3"]
    whole, arguments = build(family), inputs(family)
    split = parallelize(build(family), None)
    for model in (whole, split):
        loss_of(model, arguments)[1].backward()
    right = worst_gradient(whole, split, rank)
    norm = next(param for name, param in split.named_parameters() if name.endswith("q_norm.weight"))
    assert norm.grad is not None
    norm.grad.mul_(0.999)
    return right, worst_gradient(whole, split, rank)


def test_the_comparison_sees_a_gradient_that_is_a_thousandth_off() -> None:
    """A comparison that passes everything would pass every family."""
    for right, wrong in run_distributed(2, _losing_a_sum):
        assert right <= LIMIT < wrong


def test_a_name_that_is_no_family_is_refused() -> None:
    """A typing mistake must not end in an empty table that passes."""
    with pytest.raises(ValueError, match="gtp2"):
        named(("gtp2",))
    assert [family.name for family in named(("gpt2",))] == ["gpt2"]
    assert len(named(())) == len(FAMILIES)


def test_models_of_the_catalogue_are_reproducible() -> None:
    """Ranks build their own copy: two builds must be one model, or every comparison is of two models."""
    first, second = (build(FAMILIES["deepseek_v3"]).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
