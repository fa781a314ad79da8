"""The sm_90 mainloop on CPU threads, with bugs planted in its pipeline: each must be noticed.

The programs themselves are run by ctest (`make emu`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest

from tests.device import emulation
from tests.device.emulation import Mutant, Result

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

MAINLOOP = "cuda/kernels/gemm_sm90.cuh"
EPILOGUE = "cuda/kernels/gemm_store.cuh"
DESCRIPTOR = "cuda/kernels/descriptor.h"


def _mutant(name: str, before: str, after: str, file: str = MAINLOOP, *, tsan: bool = False) -> Mutant:
    return Mutant(name, file, before, after, program="gemm_hooks_sm90", tsan=tsan)


MUTANTS = (
    _mutant("stage_released_early", "ptx::wgmma_wait_group<1>();", "ptx::wgmma_wait_group<2>();", tsan=True),
    _mutant(
        "no_wait_for_an_empty_stage", "ptx::mbarrier_wait(ring.empty_at(place.stage), place.phase ^ 1);", ""
    ),
    _mutant(
        "no_wait_for_the_products",
        "  ptx::wgmma_wait_group<0>();\n  ptx::wgmma_registers(c);\n  release_stage(ring, running);",
        "  ptx::wgmma_registers(c);\n  release_stage(ring, running);",
    ),
    _mutant(
        "rows_behind_the_tile_stored",
        "work.rows || valid <= 0) continue;",
        "1024 || valid <= 0) continue;",
        EPILOGUE,
    ),
    _mutant("no_proxy_fence", "      ptx::fence_proxy_async_global();\n", "", tsan=True),
    _mutant("barriers_not_shown_to_the_copy_engine", "    ptx::fence_mbarrier_init();\n", ""),
    _mutant("fewer_bytes_expected", "full, Tile::kStageBytes);", "full, Tile::kStageBytes - Tile::kXBytes);"),
    _mutant(
        "published_before_all_have_stored",
        "      ptx::bar_sync(kConsumerBarrier, kConsumerThreads);",
        "      ",
        tsan=True,
    ),
    _mutant("published_without_its_rows", "ptx::tid_x() == 0 && open)", "ptx::tid_x() == 0)"),
    _mutant(
        "registers_taken_back_early",
        "ptx::bar_sync(kEndBarrier, kGemmThreads);\n    ptx::setmaxnreg_inc<kLaunchRegisters>();",
        "ptx::setmaxnreg_inc<kLaunchRegisters>();\n    ptx::bar_sync(kEndBarrier, kGemmThreads);",
    ),
    _mutant(
        "registers_moved_twice_without_meeting",
        "    ptx::bar_sync(kConsumerBarrier, kConsumerThreads);\n    ptx::setmaxnreg_dec",
        "    ptx::setmaxnreg_dec",
    ),
    _mutant(
        "offsets_of_mn_major_weights_swapped",
        "matrix_descriptor(start, box_bytes, kSwizzleAtomBytes)",
        "matrix_descriptor(start, kSwizzleAtomBytes, box_bytes)",
        DESCRIPTOR,
    ),
    _mutant("tail_of_k_dropped", "(depth + stage_depth - 1) / stage_depth", "depth / stage_depth"),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_in_the_pipeline_is_caught(mutant: Mutant, end_of: Callable[[Mutant], Result]) -> None:
    """Would catch: emulator or test programs that no longer notice the bug."""
    emulation.require_caught(end_of(mutant))
