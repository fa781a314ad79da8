"""Attention over a latent, cut by heads: with and without a query latent, more ranks than heads, caches, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from interlace.families.catalogue import FAMILIES, build, inputs
from interlace.families.check import LIMIT, check, generated, loss_of, worst_gradient
from interlace.modules.latent import LatentLinear
from interlace.parallelize import parallelize
from interlace.parallelize.latent import find_latent
from interlace.parallelize.plan import Place
from tests.distributed import run_distributed

pytest.importorskip("transformers")
FAMILY = FAMILIES["deepseek_v3"]


def _check(rank: int, world_size: int, options: dict[str, Any]) -> None:
    row = check(FAMILY, **options)
    assert row.passed, f"{options}: {row.problem}"


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (2, {"q_lora_rank": None}),
        (2, {"rope_interleave": False, "attention_bias": True}),
        (3, {"q_lora_rank": None, "attention_bias": True}),
        (3, {"num_attention_heads": 2, "num_key_value_heads": 2}),
        (4, {"num_attention_heads": 3, "num_key_value_heads": 3, "q_lora_rank": None}),
    ],
)
def test_forms_of_latent_attention_are_right(world_size: int, options: dict[str, Any]) -> None:
    """Without a query latent the input itself enters; with more ranks than heads a head lies on two of them."""
    run_distributed(world_size, _check, options)


def _twice(rank: int, world_size: int) -> list[float]:
    """Two forwards before the backwards, of other lengths, one under no_grad in between."""
    whole, split = build(FAMILY), parallelize(build(FAMILY), None)
    short = {name: value[:, :4] for name, value in inputs(FAMILY, seed=5).items()}
    for model in (whole, split):
        first = loss_of(model, inputs(FAMILY))[1]
        with torch.no_grad():
            model(**short)
        second = loss_of(model, short)[1]
        (first + second).backward()
    return [worst_gradient(whole, split, rank)]


def test_what_entered_for_one_forward_is_not_used_by_another() -> None:
    """The entry keeps tensors from the first projection to the last: another forward must find its own."""
    assert max(error for errors in run_distributed(2, _twice) for error in errors) < LIMIT


def _cache(rank: int, world_size: int) -> tuple[int, ...]:
    split = parallelize(build(FAMILY), None)
    with torch.no_grad():
        out = split(**inputs(FAMILY), use_cache=True)
    cache = out.past_key_values
    assert torch.equal(generated(FAMILY, split, "dynamic"), generated(FAMILY, build(FAMILY), "dynamic"))
    return tuple(cache.layers[0].keys.shape)


def test_the_cache_holds_the_latent_once_and_not_per_head() -> None:
    """The point of latent attention: a rank's cache does not grow with its heads."""
    latent = FAMILY.settings["kv_lora_rank"]
    for shape in run_distributed(2, _cache):
        assert shape[1] == 1
        assert shape[-1] == latent


class Attention(nn.Module):
    """Latent attention with what a test adds to it."""

    def __init__(self, extra: nn.Module | None = None) -> None:
        super().__init__()
        self.num_heads, self.scale_heads = 4, 4
        self.q_proj = nn.Linear(12, 20)
        self.kv_a_proj_with_mqa = nn.Linear(12, 8)
        self.kv_a_layernorm = nn.LayerNorm(6)
        self.kv_b_proj = nn.Linear(6, 24)
        self.o_proj = nn.Linear(12, 12)
        if extra is not None:
            self.indexer = extra

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(self.q_proj(x)[..., :12] * self.num_heads)


class Counting(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(self.q_proj(x)[..., :12] / self.scale_heads)


def _find(module: nn.Module) -> Any:
    model = nn.ModuleDict({"attn": module})
    return find_latent("attn", dict(model.named_modules()), Place(1, 3))


def test_the_plan_counts_the_heads_of_the_rank() -> None:
    """4 heads on 3 ranks: 2 + 1 + 1."""
    block = _find(Attention())
    assert block.attributes == {"num_heads": 1}
    rows = {step.name: step.shards.sizes for step in block.steps if step.shards is not None}
    assert rows == {
        "attn.q_proj": (10, 5, 5),
        "attn.kv_b_proj": (12, 6, 6),
        "attn.o_proj": (6, 3, 3),
    }


def test_parts_that_are_not_known_are_refused() -> None:
    """An indexer that reads the latent of all heads (DeepSeek-V3.2), or a count of heads under another name."""
    with pytest.raises(ValueError, match=r"attn: indexer\.weight is not known"):
        _find(Attention(nn.Linear(12, 2)))
    with pytest.raises(ValueError, match=r"reads self\.scale_heads=4"):
        _find(Counting())
    whole_heads = Attention()
    whole_heads.kv_b_proj = nn.Linear(6, 23)
    with pytest.raises(ValueError, match="expected whole heads of 4"):
        _find(whole_heads)


def test_a_latent_projection_by_itself_is_the_linear() -> None:
    """Before it is joined with others nothing may be lost."""
    linear = nn.Linear(5, 3)
    x = torch.randn(2, 5)
    assert torch.equal(LatentLinear(linear)(x), linear(x))
    assert LatentLinear(linear).weight is linear.weight
