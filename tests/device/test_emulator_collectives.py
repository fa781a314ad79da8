"""Bugs planted in the small-message collectives are caught by their test programs on CPU threads.

The programs themselves are run by ctest (`make emu`). Nothing here needs a GPU or nvcc.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest

from tests.device import emulation
from tests.device.emulation import Mutant, Result

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

KERNELS = "cuda/kernels"
COLLECTIVES = "small_collectives"
NORM = "all_reduce_norm"

MUTANTS = (
    Mutant(
        "no_second_signal",
        f"{KERNELS}/two_shot_all_reduce.cuh",
        "    open = meet_peers(group, Op::kAllReduce, gather);\n",
        "",
        program=COLLECTIVES,
    ),
    Mutant(
        "both_shots_in_one_epoch",
        f"{KERNELS}/two_shot_all_reduce.cuh",
        "gather = entry.epoch + 1;",
        "gather = entry.epoch;",
        program=COLLECTIVES,
        tsan=False,
    ),
    Mutant(
        "second_epoch_not_closed",
        f"{KERNELS}/two_shot_all_reduce.cuh",
        "leave_epoch(group, gather);",
        "leave_epoch(group, reduce);",
        program=COLLECTIVES,
        tsan=False,
    ),
    Mutant(
        "single_buffer_in_two_shot",
        f"{KERNELS}/signals.cuh",
        "parity(epoch) * group.half_bytes",
        "(epoch & 0) * group.half_bytes",
        program=COLLECTIVES,
    ),
    Mutant(
        "slot_of_the_wrong_rank",
        f"{KERNELS}/wire.cuh",
        "half(owner, epoch)[rank * slot + place]",
        "half(owner, epoch)[owner * slot + place]",
        program=COLLECTIVES,
        tsan=False,
    ),
    Mutant(
        "tail_of_a_shard_stored_whole",
        f"{KERNELS}/shard.cuh",
        "store_words(elements, i, count, ",
        "store_words(elements, i, count + 1, ",
        program=COLLECTIVES,
        tsan=False,
    ),
    Mutant(
        "chunk_published_without_release",
        f"{KERNELS}/signals.cuh",
        "  ptx::st_release_sys_u32(&control_of(group, peer).tile_arrivals[index][own_rank(group)], epoch);",
        "  ptx::st_relaxed_sys_u32(&control_of(group, peer).tile_arrivals[index][own_rank(group)], epoch);",
        program=COLLECTIVES,
    ),
    Mutant(
        "chunk_published_after_an_abort",
        f"{KERNELS}/publish_chunk.cuh",
        "if (ptx::ld_relaxed_sys_u32(&own.abort) == 0) signal_tile",
        "signal_tile",
        program=COLLECTIVES,
        tsan=False,
    ),
    Mutant(
        "no_signal_between_reduction_and_norm",
        f"{KERNELS}/two_shot_all_reduce_norm.cuh",
        "    open = meet_peers(group, Op::kAllReduce, gather);\n",
        "",
        program=NORM,
    ),
    Mutant(
        "share_reaches_into_the_next_row",
        f"{KERNELS}/two_shot_all_reduce_norm.cuh",
        "i < own_share;",
        "i < share;",
        program=NORM,
    ),
    Mutant(
        "no_sync_before_the_partial_sums_are_read",
        f"{KERNELS}/row_norm.cuh",
        "    ptx::bar_sync(1 + number, threads);\n",
        "",
        program=NORM,
    ),
    Mutant(
        "partial_sums_of_two_rows_in_one_place",
        f"{KERNELS}/row_norm.cuh",
        "partials[turn % 2][number]",
        "partials[turn & 0][number]",
        program=NORM,
    ),
    Mutant(
        "residual_added_twice_to_long_rows",
        f"{KERNELS}/row_norm.cuh",
        "sums ? sums.load(i) : sums_at(i)",
        "sums_at(i)",
        program=NORM,
        tsan=False,
    ),
    Mutant(
        "bias_dropped",
        f"{KERNELS}/row_norm.cuh",
        "    if (bias) add<T>(bias.load(i), totals);\n",
        "",
        program=NORM,
        tsan=False,
    ),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_caught(mutant: Mutant, end_of: Callable[[Mutant], Result]) -> None:
    """Would catch: emulator or test programs that no longer notice the bug."""
    emulation.require_caught(end_of(mutant))
