"""Bugs planted in the sm_80 mainloop are caught by its test program on CPU threads.

The program itself is run by ctest (`make emu`). Nothing here needs a GPU or nvcc.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest

from tests.device import emulation
from tests.device.emulation import Mutant, Result

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

MAINLOOP = "cuda/kernels/gemm_sm80.cuh"


def _planted(name: str, before: str, after: str, *, tsan: bool = False) -> Mutant:
    return Mutant(name, MAINLOOP, before, after, program="gemm_hooks_sm80", tsan=tsan)


MUTANTS = (
    _planted("stage_read_before_its_copies_arrive", "    ptx::cp_async_wait_group<kStages - 2>();\n", ""),
    _planted("no_barrier_after_the_copies", "    ptx::barrier_sync();\n    loader.load(", "    loader.load("),
    _planted(
        "results_over_a_stage_that_is_read",
        "    ptx::barrier_sync();  // the last stage is read: its memory may take results\n",
        "",
        tsan=True,
    ),
    _planted(
        "published_before_all_threads_have_stored",
        "    ptx::barrier_sync();\n    if constexpr (Hooks::kPublishes)",
        "    if constexpr (Hooks::kPublishes)",
        tsan=True,
    ),
    _planted(
        "rows_read_before_they_were_acquired",
        "      ptx::barrier_sync();\n      open = shared.open != 0;",
        "      open = shared.open != 0;",
        tsan=True,
    ),
    _planted("tile_cut_short_is_published", "ptx::tid_x() == 0 && open", "ptx::tid_x() == 0"),
    _planted(
        "dropped_tail_predicate",
        "left < kTransferElements ? static_cast<int>(left) : kTransferElements",
        "kTransferElements",
    ),
    _planted("second_segment_starts_late", "      ++segment;\n      step = 0;\n", "      ++segment;\n"),
    _planted("alignment_assumed", "const bool aligned = part.aligned();", "const bool aligned = true;"),
    _planted(
        "staging_of_the_wrong_half", "gathered.halves[work.source - 1]", "gathered.halves[2 - work.source]"
    ),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_caught(mutant: Mutant, end_of: Callable[[Mutant], Result]) -> None:
    """Would catch: emulator or a test program that no longer notices the bug."""
    emulation.require_caught(end_of(mutant))
