"""Hugging Face families, split by plan="auto": logits, every gradient, and generation equal the unsplit model's."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import run_distributed
from tests.parallelize import models

pytest.importorskip("transformers")
WORLDS = (1, 2, 3, 4)


def _ids(batch: int = 2, length: int = 7) -> torch.Tensor:
    return torch.randint(
        1, models.SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(1)
    )


def _families(rank: int, world_size: int, families: list[str], sequence_parallel: bool) -> None:
    for family in families:
        try:
            models.check_split(models.make(family), _ids(), sequence_parallel=sequence_parallel)
        except Exception as error:
            raise AssertionError(f"{family}, sequence_parallel={sequence_parallel}: {error}") from error


@pytest.mark.parametrize("world_size", WORLDS)
def test_every_family_has_the_logits_and_gradients_of_the_unsplit_model(world_size: int) -> None:
    """A family whose forward needs more than smaller linears: heads counted in attributes, per-head norms, ..."""
    run_distributed(world_size, _families, [*models.LLAMA_LIKE, *models.BERT_LIKE], False)


@pytest.mark.parametrize("world_size", WORLDS)
def test_every_family_is_right_with_sequence_parallel(world_size: int) -> None:
    """7 tokens on 2, 3, 4 ranks: uneven shards; norms and row biases see a shard and need the sum of all."""
    run_distributed(world_size, _families, [*models.LLAMA_LIKE, *models.BERT_LIKE], True)
