"""The CUDA kernels compile for sm_80, sm_90a and sm_100a, stay in registers, and keep the orders the protocol needs.

Needs nvcc, not a GPU. Registers, spills and stack come from ptxas; the memory orders are read in the PTX, and in the
machine code where a disassembler (cuobjdump and nvdisasm) is at hand.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.device import emulation
from tests.device.emulation import Mutant
from tests.device.toolkit import find_tool

ARCHITECTURES = ("80", "90a", "100a")
KERNELS = tuple(sorted(path.name for path in (emulation.CSRC / "cuda" / "kernels").glob("*.cu")))
REGISTER_CAP = 96  # two blocks of 256 threads fit on a multiprocessor
TIMEOUT_SECONDS = 240

# the instructions that publish and wait; without the scope .sys another GPU need not see them
PUBLISHES = re.compile(r"\bst\.release\.sys\.global\.u32\b")
WAITS = re.compile(r"\bld\.acquire\.sys\.global\.u32\b")


NVCC = find_tool("nvcc")
CUOBJDUMP = find_tool("cuobjdump")
pytestmark = pytest.mark.skipif(NVCC is None, reason="needs nvcc")


@dataclass(frozen=True)
class Function:
    """What ptxas says about one kernel."""

    name: str
    architecture: str
    registers: int
    stack: int
    spills: int


def _nvcc(source: Path, architectures: tuple[str, ...], *options: str) -> str:
    """Compile one kernel file of a csrc folder; returns what nvcc and ptxas printed."""
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in architectures]
    include = source.parents[2]
    command = [str(NVCC), "-std=c++20", "-O3", "--expt-relaxed-constexpr", f"-I{include}", *targets, *options]
    finished = subprocess.run(
        [*command, str(source)], capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout + finished.stderr


def _functions(report: str) -> list[Function]:
    """Parse the report of `ptxas -v`."""
    pattern = re.compile(
        r"Compiling entry function '(?P<name>\w+)' for '(?P<arch>\w+)'"
        r".*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
        r".*?Used (?P<registers>\d+) registers",
        re.DOTALL,
    )
    return [
        Function(
            match["name"],
            match["arch"],
            int(match["registers"]),
            int(match["stack"]),
            int(match["stores"]) + int(match["loads"]),
        )
        for match in pattern.finditer(report)
    ]


def _check_resources(source: Path, architectures: tuple[str, ...], output: Path) -> None:
    """Fail when a kernel of the file spills, keeps arrays in local memory, or needs too many registers."""
    functions = _functions(_nvcc(source, architectures, "-Xptxas=-v", "-c", "-o", str(output)))
    assert {function.architecture for function in functions} == {f"sm_{arch}" for arch in architectures}
    for function in functions:
        assert function.spills == 0, f"spills: {function}"
        assert function.stack == 0, f"local memory: {function}"
        assert function.registers <= REGISTER_CAP, f"too many registers: {function}"


def _check_orders(source: Path, output: Path) -> None:
    """Fail when a kernel of the file publishes or waits without release and acquire at system scope."""
    _nvcc(source, (), "-arch=compute_90a", "--ptx", "-o", str(output))
    entries = re.split(r"\.visible \.entry ", output.read_text())[1:]
    assert entries, f"no kernel in {source.name}"
    for entry in entries:
        name = entry.split("(", 1)[0]
        assert PUBLISHES.search(entry), f"{name} does not publish with st.release.sys"
        assert WAITS.search(entry), f"{name} does not wait with ld.acquire.sys"


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_fit_their_registers(kernel: str, tmp_path: Path) -> None:
    """Would catch: an array indexed at run time, an unroll that does not happen, a register explosion."""
    _check_resources(emulation.CSRC / "cuda" / "kernels" / kernel, ARCHITECTURES, tmp_path / "kernel.o")


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_publish_and_wait_at_system_scope(kernel: str, tmp_path: Path) -> None:
    """Would catch: a signal that works between blocks of one GPU only."""
    _check_orders(emulation.CSRC / "cuda" / "kernels" / kernel, tmp_path / "kernel.ptx")


@pytest.mark.skipif(
    CUOBJDUMP is None,
    reason="needs cuobjdump beside nvcc (CUDA toolkit, or pip install nvidia-cuda-cuobjdump)",
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_machine_code_keeps_orders_and_uses_no_local_memory(kernel: str, tmp_path: Path) -> None:
    """Would catch: an assembler that weakens or drops what the PTX asks for."""
    source = emulation.CSRC / "cuda" / "kernels" / kernel
    _nvcc(source, ARCHITECTURES, "-c", "-o", str(tmp_path / "kernel.o"))
    dump = [str(CUOBJDUMP), "-sass", str(tmp_path / "kernel.o")]
    listing = subprocess.run(dump, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=True).stdout
    functions = re.split(r"Function : ", listing)[1:]
    assert len(functions) % len(ARCHITECTURES) == 0 and functions
    for function in functions:
        name = function.split("\n", 1)[0]
        assert re.search(r"\bLD[G]?\.E.*STRONG\.SYS", function), f"{name}: no load at system scope"
        assert re.search(r"\bST[G]?\.E.*STRONG\.SYS", function), f"{name}: no store at system scope"
        assert "MEMBAR" in function, f"{name}: nothing orders the stores before the signal"
        assert not re.search(r"\b(LDL|STL)\b", function), f"{name}: local memory"


BROKEN_RESOURCES = Mutant(
    "array_indexed_at_run_time",
    "cuda/kernels/one_shot_all_reduce.cuh",
    "float total = to_float(shown[0].elements[element]);",
    "float total = to_float(shown[rank % kWorldSize].elements[(element + rank) % Pack<T>::kElements]);",
)
BROKEN_ORDERS = (
    Mutant("weak_publish", "cuda/kernels/ptx.cuh", "st.release.sys.global.u32", "st.release.gpu.global.u32"),
    Mutant("weak_wait", "cuda/kernels/ptx.cuh", "ld.acquire.sys.global.u32", "ld.relaxed.sys.global.u32"),
)


def test_the_resource_gate_fails_for_a_broken_kernel(tmp_path: Path) -> None:
    """Would catch: a gate that reads nothing."""
    emulation.copy_with_bug(BROKEN_RESOURCES, tmp_path / "csrc")
    source = tmp_path / "csrc" / "cuda" / "kernels" / "one_shot_all_reduce.cu"
    with pytest.raises(AssertionError, match="local memory"):
        _check_resources(source, ("90a",), tmp_path / "kernel.o")


@pytest.mark.parametrize("mutant", BROKEN_ORDERS, ids=lambda mutant: mutant.name)
def test_the_order_gate_fails_for_a_broken_kernel(mutant: Mutant, tmp_path: Path) -> None:
    """Would catch: a gate that looks for the wrong words."""
    emulation.copy_with_bug(mutant, tmp_path / "csrc")
    with pytest.raises(AssertionError, match="does not"):
        _check_orders(tmp_path / "csrc" / "cuda" / "kernels" / "barrier.cu", tmp_path / "kernel.ptx")
