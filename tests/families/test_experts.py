"""Routed experts cut by features: collectives, routers, odd sizes, and what the planner refuses."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import interlace
from interlace.counting import count_ops
from interlace.families.catalogue import FAMILIES, build, inputs
from interlace.families.check import LIMIT, check, loss_of, worst_gradient
from interlace.modules.experts import ParallelExperts, expert_shards
from interlace.modules.layout import layouts_of
from interlace.parallelize import parallelize
from interlace.parallelize.experts import find_experts
from interlace.parallelize.plan import Place
from tests.distributed import run_distributed

pytest.importorskip("transformers")


def test_features_are_cut_in_aligned_blocks_where_there_are_enough() -> None:
    """Grouped products want rows of 16 bytes: an aligned expert must not become two that are not."""
    assert expert_shards(64, 3).sizes == (24, 24, 16)
    assert expert_shards(20, 4).sizes == (8, 4, 4, 4)
    assert expert_shards(10, 4).sizes == (4, 2, 2, 2)
    assert expert_shards(7, 2).sizes == (4, 3)
    assert expert_shards(2, 4).sizes == (1, 1, 0, 0)


def _odd(rank: int, world_size: int, features: int) -> None:
    for name in ("mixtral", "deepseek_v3", "gpt_oss"):
        own = "moe_intermediate_size" if name == "deepseek_v3" else "intermediate_size"
        row = check(FAMILIES[name], experts_implementation="eager", **{own: features})
        assert row.passed, f"{name}, {features} features: {row.problem}"


@pytest.mark.parametrize(("world_size", "features"), [(2, 7), (3, 5), (4, 2)])
def test_experts_of_odd_sizes_are_right(world_size: int, features: int) -> None:
    """Shards of 4 + 3; with 2 features on 4 ranks two ranks hold none and must still meet every collective."""
    run_distributed(world_size, _odd, features)


def _collectives(name: str, layers: int, **options: Any) -> tuple[int, int]:
    """Forward and backward collectives of one step of a model with this many layers."""
    family = FAMILIES[name]
    model = parallelize(build(family, num_hidden_layers=layers, **options), None)
    with count_ops() as counts:
        loss_of(model, inputs(family))[1].backward()
    return counts.forward.total(), counts.backward.total()


def _per_layer(rank: int, world_size: int) -> None:
    for name, options in (
        ("mixtral", {}),
        ("gpt_oss", {"layer_types": None}),
        ("deepseek_v3", {"first_k_dense_replace": 0}),
        ("deepseek_v3", {"first_k_dense_replace": 0, "q_lora_rank": None}),
    ):
        fewer, more = (_collectives(name, layers, **options) for layers in (1, 2))
        per_layer = more[0] - fewer[0], more[1] - fewer[1]
        assert per_layer == (2, 2), f"{name} {options}: {per_layer} collectives per layer"


def test_a_layer_of_experts_has_two_collectives_each_way() -> None:
    """Attention and experts, one each; shared experts, routing weights, latents and their norms ride along."""
    run_distributed(2, _per_layer)


def _auxiliary(rank: int, world_size: int) -> list[float]:
    family = FAMILIES["mixtral"]
    arguments = {**inputs(family), "labels": inputs(family)["input_ids"], "output_router_logits": True}
    whole, split = build(family), parallelize(build(family), None)
    losses = []
    for model in (whole, split):
        out = model(**arguments)
        assert out.aux_loss.item() > 0
        (out.loss + 10 * out.aux_loss).backward()
        losses.append(out.loss.item())
    return [abs(losses[0] - losses[1]) / abs(losses[0]), worst_gradient(whole, split, rank)]


def test_a_loss_on_the_router_is_counted_once() -> None:
    """A router inside the region would have the gradient of the balancing loss once per rank."""
    for difference, gradient in run_distributed(2, _auxiliary):
        assert difference < LIMIT
        assert gradient < LIMIT


def _frozen(rank: int, world_size: int) -> float:
    family = FAMILIES["deepseek_v3"]
    whole, split = build(family), parallelize(build(family), None)
    for model in (whole, split):
        for name, param in model.named_parameters():
            param.requires_grad_("experts" not in name and "norm" not in name and "embed" not in name)
        loss_of(model, inputs(family))[1].backward()
    return worst_gradient(whole, split, rank)


def test_frozen_experts_pass_the_gradient_on() -> None:
    """With experts and norms frozen nothing of them is computed, but what lies below needs dX and the routing."""
    assert max(run_distributed(2, _frozen)) < LIMIT


def _copies(rank: int, world_size: int) -> None:
    for name in ("gpt_oss", "deepseek_v3"):
        family = FAMILIES[name]
        whole, split = build(family), parallelize(build(family), None)
        again = io.BytesIO()
        torch.save(split, again)
        again.seek(0)
        expected, loss = loss_of(whole, inputs(family))
        loss.backward()
        for twin in (copy.deepcopy(split), torch.load(again, weights_only=False)):
            assert set(layouts_of(twin)) == set(layouts_of(split))
            logits, loss = loss_of(twin, inputs(family))
            loss.backward()
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
            assert worst_gradient(whole, twin, rank) < LIMIT, name
        assert all(param.grad is None for param in split.parameters()), "a copy shares parameters"


def test_copies_and_pickles_of_split_experts_are_models_of_their_own() -> None:
    """Stand-ins share dicts with the module inside them, sinks live in a class made at run time."""
    run_distributed(2, _copies)


def _aligned(rank: int, world_size: int) -> list[str]:
    family = FAMILIES["mixtral"]
    model = build(family, intermediate_size=12)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallelize(model, None)
    model(**inputs(family))
    return [str(warning.message) for warning in caught if "expert by expert" in str(warning.message)]


def test_a_shard_too_narrow_for_grouped_products_says_so() -> None:
    """12 features of 4 bytes are aligned, and so are 4 of them, 2 are not: slower, right, and not silently so."""
    said = run_distributed(4, _aligned)
    assert [bool(warned) for warned in said] == [False, False, True, True]
    assert "split over fewer ranks" in said[3][0]


def _checkpoint(rank: int, world_size: int, name: str) -> None:
    family = FAMILIES[name]
    whole, split = build(family), parallelize(build(family), None)
    state, expected = interlace.full_state_dict(split), whole.state_dict()
    assert set(state) == set(expected)
    assert all(torch.equal(state[key], expected[key]) for key in expected)
    for model in (whole, split):
        loss_of(model, inputs(family))[1].backward()
    grads = interlace.full_grads(split)
    for key, param in whole.named_parameters():
        if param.grad is not None:
            torch.testing.assert_close(grads[key], param.grad, rtol=1e-4, atol=1e-3)
    norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item() for model in (whole, split)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_whole_experts_latents_and_sinks_come_back(name: str) -> None:
    """Gate and up in two slices, or interleaved; sinks cut by heads: a checkpoint must be the unsplit model's."""
    run_distributed(3, _checkpoint, name)


def _hooks(rank: int, world_size: int) -> None:
    family = FAMILIES["mixtral"]
    model = build(family)
    seen: list[str] = []
    experts: Any = model.model.layers[0].mlp.experts  # type: ignore[union-attr, index]
    experts.register_forward_hook(lambda *_: seen.append("experts"))
    parallelize(model, None)
    model(**inputs(family))
    assert seen == ["experts"], seen
    stand_in: Any = model.model.layers[0].mlp.experts  # type: ignore[union-attr, index]
    assert isinstance(stand_in, ParallelExperts)
    assert stand_in.num_experts == family.settings["num_local_experts"]


def test_hooks_on_experts_fire_once() -> None:
    """The stand-in and the module in it both have hook lists."""
    run_distributed(2, _hooks)


class Scaled(nn.Module):
    """Says that it holds experts as transformers' own do, but scales by the norm of all features."""

    has_gate, has_bias, is_transposed, is_concatenated = True, False, False, True

    def __init__(self) -> None:
        super().__init__()
        vars(self).update(
            has_gate=True, has_bias=False, is_transposed=False, is_concatenated=True, num_experts=3
        )
        self.gate_up_proj = nn.Parameter(torch.randn(3, 16, 6))
        self.down_proj = nn.Parameter(torch.randn(3, 6, 8))

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for place in range(indices.shape[1]):
            gate, up = torch.einsum("th,tfh->tf", x, self.gate_up_proj[indices[:, place]]).chunk(2, -1)
            hidden = self.inner(gate.sigmoid() * up)
            out = (
                out
                + torch.einsum("tf,thf->th", hidden, self.down_proj[indices[:, place]])
                * weights[:, place, None]
            )
        return out

    def inner(self, hidden: Tensor) -> Tensor:
        return hidden / hidden.norm(dim=-1, keepdim=True)


class Plain(Scaled):
    """As transformers' own do."""

    def inner(self, hidden: Tensor) -> Tensor:
        return hidden


class Mixture(nn.Module):
    """A router, experts, and what `combine` makes of their output."""

    def __init__(self, experts: nn.Module, combine: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 3)
        self.experts = experts
        self.combine = combine

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, 6)
        weights, indices = self.gate(flat).softmax(-1).topk(2)
        return self.combine(self, self.experts(flat, indices, weights)).view(x.shape)


def _find(block: nn.Module) -> Any:
    model = nn.ModuleDict({"mlp": block})
    return find_experts("mlp.experts", dict(model.named_modules()), Place(0, 2))


def test_experts_that_are_no_sum_over_features_are_refused() -> None:
    """Marks and shapes fit, only running it on parts shows that the parts do not add up."""
    assert _find(Mixture(Plain(), lambda block, y: y)) is not None
    with pytest.raises(ValueError, match=r"mlp\.experts: Scaled does not sum over the features"):
        _find(Mixture(Scaled(), lambda block, y: y))


def test_a_block_that_reads_the_parameters_of_its_experts_is_refused() -> None:
    """It would read a shard and take it for the whole, without an error."""
    with pytest.raises(ValueError, match="cannot be tried with other experts"):
        _find(Mixture(Plain(), lambda block, y: y * block.experts.down_proj.mean()))


def test_experts_with_other_parameters_are_refused() -> None:
    """A norm per feature, say, would be left whole beside cut matrices."""
    experts = Plain()
    experts.scale = nn.Parameter(torch.ones(8))
    with pytest.raises(ValueError, match=r"mlp\.experts: parameters .*scale"):
        _find(Mixture(experts, lambda block, y: y))


def test_modules_without_the_marks_are_not_taken_for_experts() -> None:
    """Three-dimensional parameters alone say nothing of what they are for."""
    experts = Plain()
    del experts.__dict__["is_transposed"]
    assert _find(Mixture(experts, lambda block, y: y)) is None
