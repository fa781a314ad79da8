"""Ranks of one call hold shards of different lengths, also none: on CUDA all must still go the same way."""

from __future__ import annotations

import torch

import interlace
from interlace.cuda_dispatch import KERNELS
from tests.distributed import run_distributed
from tests.ops.device_schemas import gpus

DEPTH = 8192


def gathered_by_few(rank: int, world_size: int) -> tuple[str, list[list[int]], list[int]]:
    """One row in all: a rank has none. What it takes, the shapes of what it launches with, of what it returns."""
    name = interlace.resolve(None).name
    with gpus(name) as recorder:
        out = KERNELS["all_gather"](
            torch.empty(1 - rank, DEPTH, dtype=torch.bfloat16, device="meta"), 0, name, 1
        )
        given = [list(args[0].shape) for op, args in recorder.calls if "half_bytes" not in op]
        return interlace.last_path().algorithm, given, list(out.shape)


def test_a_rank_without_rows_gathers_as_the_others_do() -> None:
    """Catches a width that an empty shard seems not to have: the ranks would choose by different sizes."""
    first, second = run_distributed(2, gathered_by_few)
    assert first == ("one_shot", [[1, DEPTH]], [1, DEPTH])
    assert second == ("one_shot", [[0, DEPTH]], [1, DEPTH])
