"""What a rank holds while it attends to a sequence of all ranks: its share, and two blocks of keys and values."""

from __future__ import annotations

import pytest
import torch

from interlace import functional, memory_report
from interlace.bench.attention import _both, _unsplit
from interlace.bench.peak import peak_bytes
from tests.attention.reference import Case, held
from tests.distributed import run_distributed

SLACK = 1 << 18  # log-sum-exps, masks
CASE = Case(heads=8, kv_heads=8, tokens=2048, width=64, batch=1, dtype=torch.float32)


def growth(rank: int, world_size: int, name: str) -> tuple[int, int, int, int]:
    """Bytes of forward and backward: split, on one process, and of one block of keys and values."""
    whole = list(CASE.draw())
    own = [t[:, :, held("zigzag", CASE, world_size, rank)].contiguous() for t in whole]
    attend = getattr(functional, name)
    split = peak_bytes(
        lambda: _both(lambda q, k, v: attend(q, k, v, group=None, causal=True, layout="zigzag"), own)
    )
    window = sum(group.window_bytes for group in memory_report().groups)
    single = peak_bytes(lambda: _both(lambda q, k, v: _unsplit(q, k, v, None), whole))
    return split, window, single, 2 * own[1].nbytes


@pytest.mark.parametrize("world_size", [2, 4])
def test_memory_of_a_rank(world_size: int) -> None:
    for split, window, single, block in run_distributed(world_size, growth, "ring_attention"):
        assert single > 4 * 2048 * 8 * 64, "the unsplit run was not seen: no measurement"
        assert split + window <= single / world_size + 2 * block + SLACK, (split, window, single, block)
