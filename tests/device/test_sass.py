"""The CUDA kernels as machine code: they stay in registers, use the tensor cores and the copy engines of their
architecture, and keep the orders that the protocol needs.

Needs nvcc and a disassembler (cuobjdump with nvdisasm), not a GPU.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.device import emulation, machine_code
from tests.device.emulation import Mutant
from tests.device.machine_code import Kernel
from tests.device.toolkit import find_tool

pytestmark = [
    pytest.mark.timeout(machine_code.TIMEOUT_SECONDS),  # the first test compiles all kernels
    pytest.mark.skipif(find_tool("nvcc") is None, reason="needs nvcc"),
    pytest.mark.skipif(
        find_tool("cuobjdump") is None,
        reason="needs cuobjdump (CUDA toolkit, or pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm)",
    ),
]

SOURCES = tuple(sorted(path.name for path in (emulation.CSRC / "cuda" / "kernels").glob("*.cu")))
ARCHITECTURES = {"_sm90.cu": {"sm_90"}, "_sm100.cu": {"sm_100"}}
ALL_ARCHITECTURES = {"sm_80", "sm_90", "sm_100"}

# Registers per thread; one block per multiprocessor: blocks that wait for each other must all be resident. 65536 / 384
# threads of a Hopper GEMM = 168, as many for the others; the older mainloop and the norms have 256 threads.
REGISTER_CAPS = {"gemm_sm80": 255, "_norm_kernel": 255, "": 168}
TALKS_TO_NOBODY = re.compile(r"plain_gemm")  # the only kernels without signals
WAITS_FOR_NOBODY = re.compile(r"publish_chunk")  # signals in stream order

# st.release.sys: a fence of the system's scope, then the store; ld.acquire.sys: the load, then the L1 is emptied
PUBLISHES = re.compile(
    r"MEMBAR\.\w+\.SYS(?:[^;]*ERRBAR)*[^;]*;[^;]*(?:[^;]*;){0,6}?[^;]*\bST(?:G)?\.E\.STRONG\.SYS"
)
WAITS = re.compile(r"\bLD(?:G)?\.E\.STRONG\.SYS(?:[^;]*;){1,6}?[^;]*\bCCTL\.IVALL")


def check_resources(kernel: Kernel) -> None:
    """Fail when a kernel spills, keeps arrays in local memory, or needs too many registers."""
    assert kernel.stack == 0, f"local memory: {kernel.name} for {kernel.architecture}, {kernel.stack} bytes"
    assert kernel.count(r"\b(?:LDL|STL)\b") == 0, f"local memory: {kernel.name} for {kernel.architecture}"
    cap = next(cap for part, cap in REGISTER_CAPS.items() if part in kernel.name)
    assert kernel.registers <= cap, f"too many registers: {kernel.registers} in {kernel.name}"


def check_orders(kernel: Kernel) -> None:
    """Fail when a kernel publishes or waits without release and acquire at system scope."""
    if TALKS_TO_NOBODY.search(kernel.name):
        return
    assert PUBLISHES.search(kernel.code), f"{kernel.name} does not publish at system scope"
    if not WAITS_FOR_NOBODY.search(kernel.name):
        assert WAITS.search(kernel.code), f"{kernel.name} does not wait at system scope"


def check_hopper_gemm(kernel: Kernel) -> None:
    """Fail when a Hopper GEMM leaves the fast path: TMA, wgmma in flight, registers given to the consumers."""
    float8 = "Float8" in kernel.name
    assert kernel.count(r"\bQGMMA\b" if float8 else r"\bHGMMA\b") >= 4, f"no tensor cores: {kernel.name}"
    assert kernel.count(r"\bUTMALDG\b") >= 2, f"no TMA: {kernel.name}"
    assert kernel.count(r"\bUSETMAXREG\b") >= 2, f"registers are not moved: {kernel.name}"
    for registers, highest in machine_code.highest_registers(kernel):
        assert highest < registers, f"R{highest} where a thread has {registers} registers: {kernel.name}"
    if not float8:  # fp8 adds to its sums after each stage
        in_flight = kernel.count(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1\b")
        assert in_flight >= 1, f"the tensor cores wait for each stage: {kernel.name}"


def check_ampere_gemm(kernel: Kernel) -> None:
    """Fail when the older mainloop does not use mma.sync, ldmatrix and cp.async."""
    for instruction in ("HMMA", "LDSM", "LDGSTS"):
        assert kernel.count(rf"\b{instruction}\b") > 0, f"no {instruction}: {kernel.name}"


@pytest.mark.parametrize("source", SOURCES)
def test_machine_code_is_what_the_kernels_are_written_for(source: str) -> None:
    """Would catch: a spill, an array indexed at run time, tensor cores that stand still, a signal of one GPU only."""
    kernels = machine_code.kernels_of(machine_code.built_objects()[source])
    expected = next(
        (found for end, found in ARCHITECTURES.items() if source.endswith(end)), ALL_ARCHITECTURES
    )
    assert {kernel.architecture for kernel in kernels} == expected
    for kernel in kernels:
        check_resources(kernel)
        check_orders(kernel)
        if "gemm_sm90" in kernel.name:
            check_hopper_gemm(kernel)
        if "gemm_sm80" in kernel.name:
            check_ampere_gemm(kernel)


# ---- the gates fail when a kernel is broken on purpose ----

SIGNALS = "cuda/kernels/signals.cuh"
MAINLOOP = "cuda/kernels/gemm_sm90.cuh"
EPILOGUE = "cuda/kernels/gemm_store.cuh"
ONE_GEMM = """
#include "cuda/kernels/plain_gemm_sm90.cuh"
namespace interlace {
void launch(const GemmArguments& arguments, const GemmTensorMaps& maps) {
  plain_gemm_sm90_kernel<GemmTile<BFloat16, 128, false>><<<1, kGemmThreads>>>(maps, arguments);
}
}  // namespace interlace
"""
BROKEN_ORDERS = (
    Mutant("weak_publish", "cuda/kernels/ptx.cuh", "st.release.sys.global.u32", "st.relaxed.sys.global.u32"),
    Mutant(
        "narrow_publish", "cuda/kernels/ptx.cuh", "st.release.sys.global.u32", "st.release.gpu.global.u32"
    ),
    Mutant("weak_wait", "cuda/kernels/ptx.cuh", "ld.acquire.sys.global.u32", "ld.relaxed.sys.global.u32"),
)
BROKEN_GEMMS = (
    (
        Mutant("one_stage_at_a_time", MAINLOOP, "wgmma_wait_group<1>", "wgmma_wait_group<0>"),
        "wait for each stage",
    ),
    (
        Mutant("too_few_registers", MAINLOOP, "kProducerRegisters = 72", "kProducerRegisters = 24"),
        "local memory",
    ),
    (
        Mutant("run_time_index", EPILOGUE, "accumulators + pack * 4;", "accumulators + lane % 8 * 4;"),
        "local memory",
    ),
)


@pytest.mark.parametrize("mutant", BROKEN_ORDERS, ids=lambda mutant: mutant.name)
def test_the_order_gate_fails_for_a_broken_kernel(mutant: Mutant, tmp_path: Path) -> None:
    """Would catch: a gate that looks for the wrong words."""
    csrc = tmp_path / "csrc"
    emulation.copy_with_bug(mutant, csrc)
    machine_code.compile_kernels(csrc / "cuda" / "kernels" / "barrier.cu", tmp_path / "barrier.o")
    with pytest.raises(AssertionError, match="at system scope"):
        for kernel in machine_code.kernels_of(tmp_path / "barrier.o"):
            check_orders(kernel)


@pytest.mark.parametrize(
    ("mutant", "complaint"), BROKEN_GEMMS, ids=[mutant.name for mutant, _ in BROKEN_GEMMS]
)
def test_the_gemm_gates_fail_for_a_broken_kernel(mutant: Mutant, complaint: str, tmp_path: Path) -> None:
    """Would catch: a gate that reads nothing."""
    csrc = tmp_path / "csrc"
    emulation.copy_with_bug(mutant, csrc)
    (csrc / "one_gemm.cu").write_text(ONE_GEMM)
    machine_code.compile_kernels(csrc / "one_gemm.cu", tmp_path / "one_gemm.o")
    (kernel,) = machine_code.kernels_of(tmp_path / "one_gemm.o")
    with pytest.raises(AssertionError, match=complaint):
        check_resources(kernel)
        check_hopper_gemm(kernel)


def test_the_register_gate_fails_for_warps_that_gave_too_many_back(tmp_path: Path) -> None:
    """Would catch: a gate that follows no branch."""
    (tmp_path / "one_gemm.cu").write_text(ONE_GEMM)
    machine_code.compile_kernels(tmp_path / "one_gemm.cu", tmp_path / "one_gemm.o")
    (kernel,) = machine_code.kernels_of(tmp_path / "one_gemm.o")
    check_hopper_gemm(kernel)
    for given, fewer in (("UP0, 0xd8", "UP0, 0x60"), ("DEALLOC.CTAPOOL 0x48", "DEALLOC.CTAPOOL 0x18")):
        assert given in kernel.code
        with pytest.raises(AssertionError, match="where a thread has"):
            check_hopper_gemm(replace(kernel, code=kernel.code.replace(given, fewer)))


def test_the_tensor_core_gates_fail_for_a_kernel_without_them() -> None:
    """Would catch: a gate that any kernel passes."""
    kernels = machine_code.kernels_of(machine_code.built_objects()["barrier.cu"])
    with pytest.raises(AssertionError, match="no tensor cores"):
        check_hopper_gemm(kernels[0])
    with pytest.raises(AssertionError, match="no HMMA"):
        check_ampere_gemm(kernels[0])
