"""The CUDA kernels on CPU threads, with planted bugs: the emulator's test programs must notice each of them.

The same programs without a bug are run by ctest (`make emu`), plain and under ThreadSanitizer. Nothing here needs a GPU
or nvcc. What the emulator cannot show: proxy fences for shared memory, the precision of fp8 sums, speed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest

from tests.device import emulation
from tests.device.emulation import Mutant, Result

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

SIGNALS = "cuda/kernels/signals.cuh"
WORDS = "cuda/kernels/words.cuh"

MUTANTS = (
    Mutant(
        "relaxed_signal",
        SIGNALS,
        "    ptx::st_release_sys_u32(&theirs.arrivals[block][rank], epoch);",
        "    ptx::st_relaxed_sys_u32(&theirs.arrivals[block][rank], epoch);",
    ),
    Mutant(
        "relaxed_wait",
        SIGNALS,
        "ptx::ld_acquire_sys_u32(awaited.word)",
        "ptx::ld_relaxed_sys_u32(awaited.word)",
    ),
    Mutant("no_block_sync_before_signal", SIGNALS, "  ptx::barrier_sync();\n  bool met", "  bool met"),
    Mutant("no_block_sync_after_wait", SIGNALS, "return ptx::barrier_red_and(met);", "return met;"),
    Mutant("single_buffer", SIGNALS, "parity(epoch) * group.half_bytes", "(epoch & 0) * group.half_bytes"),
    Mutant(
        "every_block_closes_the_epoch",
        SIGNALS,
        "ptx::atom_add_acq_rel_gpu_u32(&own.blocks_finished, 1) == ptx::nctaid_x() - 1",
        "ptx::atom_add_acq_rel_gpu_u32(&own.blocks_finished, 1) < ptx::nctaid_x()",
    ),
    Mutant(
        "signal_in_the_wrong_place",
        SIGNALS,
        "    ptx::st_release_sys_u32(&theirs.arrivals[block][rank], epoch);",
        "    ptx::st_release_sys_u32(&theirs.arrivals[block][peer], epoch);",
        tsan=False,
    ),
    Mutant(
        "compare_without_wrap",
        SIGNALS,
        "if (reached(seen, awaited.want))",
        "if (seen >= awaited.want)",
        tsan=False,
    ),
    Mutant(
        "idle_blocks_left_behind",
        SIGNALS,
        "if (block >= blocks_used)",
        "if (block >= blocks_used + kMaxBlocks)",
        tsan=False,
    ),
    Mutant(
        "staging_after_an_abort",
        SIGNALS,
        "ptx::barrier_red_and(abort == 0)",
        "ptx::barrier_red_and(true)",
        tsan=False,
    ),
    Mutant(
        "no_deadline",
        SIGNALS,
        "ptx::globaltimer() - start > group.timeout_nanoseconds",
        "ptx::globaltimer() < start",
        program="barrier",
        tsan=False,
    ),
    Mutant(
        "peers_not_told",
        SIGNALS,
        "      abort_all(group, rank);\n",
        "",
        program="barrier",
        tsan=False,
    ),
    Mutant(
        "tail_stored_whole",
        WORDS,
        "if (first + i < count) bits[i] =",
        "if (first < count) bits[i] =",
        tsan=False,
    ),
    Mutant(
        "misaligned_load",
        WORDS,
        "if (wide && first + kElements <= count) return",
        "if ((wide || count > 0) && first + kElements <= count) return",
        tsan=False,
    ),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_caught(mutant: Mutant, end_of: Callable[[Mutant], Result]) -> None:
    """Would catch: emulator or test programs that no longer notice the bug."""
    emulation.require_caught(end_of(mutant))


def test_every_mutant_names_a_program() -> None:
    """Would catch: a bug planted for a program that was renamed, and so is run by nobody."""
    assert {mutant.program for mutant in MUTANTS} <= set(emulation.PROGRAMS)
