"""Heads that do not divide: uneven groups, replicated kv heads, more ranks than heads; generation with a cache."""

from __future__ import annotations

import copy

import pytest
import torch

from interlace.parallelize.api import parallelize
from tests.distributed import run_distributed
from tests.parallelize import models

pytest.importorskip("transformers")
HEADS = [(9, 3), (4, 1), (2, 1), (3, 3), (8, 2), (12, 4)]


def _splits(rank: int, world_size: int) -> None:
    ids = torch.randint(1, 61, (2, 5), generator=torch.Generator().manual_seed(1))
    for family, attention in (("llama", "sdpa"), ("qwen3", "eager")):
        for heads, kv_heads in HEADS:
            model = models.make(family, heads, kv_heads, attention=attention, num_hidden_layers=1)
            try:
                models.check_split(model, ids)
            except Exception as error:
                raise AssertionError(f"{family} {attention} {heads}/{kv_heads}: {error}") from error


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_heads_that_do_not_divide_are_right(world_size: int) -> None:
    """9/3 over 2 is 6+3 / 2+1; 4/1 over 2 replicates the kv head, whose gradient is the sum; 2/1 over 4 idles two."""
    run_distributed(world_size, _splits)


def _generates(rank: int, world_size: int, sequence_parallel: bool) -> None:
    ids = torch.randint(1, 61, (2, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0  # left padding
    for family, heads, kv_heads in (("llama", 9, 3), ("qwen3", 4, 1), ("gemma3", 4, 1), ("mistral", 8, 4)):
        model = models.make(family, heads, kv_heads)
        split = parallelize(copy.deepcopy(model), None, sequence_parallel=sequence_parallel)
        for cache in ("dynamic", "static"):
            settings = {
                "max_new_tokens": 8,
                "do_sample": False,
                "eos_token_id": None,
                "cache_implementation": cache,
            }
            expected = model.generate(ids, attention_mask=mask, **settings)
            found = split.generate(ids, attention_mask=mask, **settings)
            assert torch.equal(found, expected), f"{family} {heads}/{kv_heads} {cache}: {found} {expected}"


@pytest.mark.parametrize("world_size", [2, 3])
def test_generation_with_a_cache_is_that_of_the_unsplit_model(world_size: int) -> None:
    """The cache holds local heads; a static one must not be allocated for all of them."""
    run_distributed(world_size, _generates, False)


def test_generation_with_sequence_parallel_is_that_of_the_unsplit_model() -> None:
    """A step of one token: one rank has it, the others have an empty shard."""
    run_distributed(2, _generates, True)
