"""Bugs planted in the fused GEMMs are caught by their test programs on CPU threads.

The programs themselves are run by ctest (`make emu`). Nothing here needs a GPU or nvcc.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest

from tests.device import emulation
from tests.device.emulation import Mutant, Result

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

SIGNALS = "cuda/kernels/signals.cuh"
GROUP = "cuda/kernels/fused_group.cuh"
GATHER = "cuda/kernels/all_gather_gemm.cuh"
SCATTER = "cuda/kernels/scatter_hooks.cuh"
REDUCER = "cuda/kernels/reducer.cuh"
REDUCE = "cuda/kernels/gemm_reduce.cuh"
ORDER = "core/gemm_schedule.h"

SIGNAL_TILE = (
    "ptx::st_release_sys_u32(&control_of(group, peer).tile_arrivals[index][own_rank(group)], epoch);"
)
SYNC_UNIT = "      ptx::barrier_sync();  // the stores of all threads are ordered before the signals\n"

MUTANTS = (
    Mutant(
        "relaxed_publish",
        SIGNALS,
        SIGNAL_TILE,
        SIGNAL_TILE.replace("release", "relaxed"),
        program="all_gather_gemm",
    ),
    Mutant(
        "no_sync_before_a_chunk_is_published",
        GATHER,
        "    ptx::barrier_sync();  // the stores of all threads are ordered before the signal\n",
        "",
        program="all_gather_gemm",
    ),
    Mutant("no_sync_before_a_unit_is_published", REDUCER, SYNC_UNIT, "", program="gemm_reduce"),
    Mutant(
        "single_buffer_of_a_gather",
        SIGNALS,
        "parity(epoch) * group.half_bytes",
        "(epoch & 0) * group.half_bytes",
        program="all_gather_gemm",
    ),
    Mutant(
        "an_empty_peer_is_not_heard",
        GROUP,
        "  return wait_for_tile(group, op, peer, 0, epoch);",
        "  return wait_for_tile(group, op, peer, 0, epoch - 1);",
        program="all_gather_gemm",
    ),
    Mutant(
        "an_empty_owner_does_not_hear",
        REDUCE,
        "    if (block == 0) hear_from_peers(group, op, epoch);\n",
        "",
        program="gemm_reduce",
    ),
    Mutant(
        "peers_in_the_wrong_turn",
        ORDER,
        "return (rank - step + world_size) % world_size;",
        "return (rank + step) % world_size;",
        program="gemm_schedule",
        tsan=False,
    ),
    Mutant(
        "claims_start_again_too_early",
        REDUCE,
        "  if (thread == 0) epoch = entry.epoch;\n",
        "  if (thread == 0) epoch = entry.epoch;\n"
        "  if (thread == 0) control_of(group, schedule.rank).claims[0] = 0;\n",
        program="gemm_reduce",
    ),
    Mutant(
        "a_row_stored_whole",
        REDUCER,
        "store_pack(to, i % packs, columns, aligned_to_pack(to), pack);",
        "store_pack(to, i % packs, columns + 1, aligned_to_pack(to), pack);",
        program="gemm_reduce",
        tsan=False,
    ),
    Mutant(
        "slots_in_another_order_than_ranks",
        SCATTER,
        "schedule.slot_offset(owner, schedule.rank, wire.row_bytes)",
        "schedule.slot_offset(owner, (schedule.rank + 1) % group.world_size, wire.row_bytes)",
        program="gemm_reduce",
        tsan=False,
    ),
    Mutant(
        "one_source_is_not_awaited",
        REDUCER,
        "      if (thread < schedule.world_size) {",
        "      if (thread < schedule.world_size - 1) {",
        program="gemm_reduce",
    ),
    Mutant(
        "tiles_of_other_blocks_unordered",
        SCATTER,
        "ptx::atom_add_acq_rel_gpu_u32(&counter, 1)",
        "ptx::atom_add_relaxed_gpu_u32(&counter, 1)",
        program="gemm_reduce",
    ),
    Mutant(
        "a_chunk_is_not_awaited",
        GATHER,
        "work.owner == arrived_from && work.index == arrived_chunk",
        "work.owner == arrived_from",
        program="all_gather_gemm",
    ),
    Mutant(
        "idle_tiles_left_behind",
        SIGNALS,
        "if (tile >= tiles_used)",
        "if (tile >= tiles_used + kMaxTileSignals)",
        program="all_gather_gemm",
        tsan=False,
    ),
    Mutant(
        "pushes_signalled_with_the_running_epoch",
        "cuda/kernels/publish_chunk.cuh",
        "signal_tile(group, peer, chunk, own.push_epoch);",
        "signal_tile(group, peer, chunk, own.epoch + 1);",
        program="fused_calls",
    ),
    Mutant(
        "no_proxy_fence",
        "cuda/kernels/gemm_sm90.cuh",
        "      ptx::fence_proxy_async_global();\n",
        "",
        program="fused_gemm_sm90",
    ),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_caught(mutant: Mutant, end_of: Callable[[Mutant], Result]) -> None:
    """Would catch: test programs that no longer notice the bug."""
    emulation.require_caught(end_of(mutant))
