"""The kernels as machine code: built once a session by the CMake target interlace_sass, read with cuobjdump.

The build folder is that of `make sass`, so that whoever ran it first did the work.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.device.toolkit import find_tool

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "sass"
TIMEOUT_SECONDS = 1800  # `make test` gives it what other tests leave of the cores


@dataclass(frozen=True)
class Kernel:
    """One kernel for one architecture: what it needs and its instructions, as text."""

    name: str  # mangled
    architecture: str  # "sm_90"
    registers: int
    stack: int  # bytes of local memory per thread: arrays indexed at run time, and spills
    code: str
    addresses: tuple[int, ...]  # of the instructions of code, in its order

    def count(self, pattern: str) -> int:
        """How many instructions match the pattern."""
        return len(re.findall(pattern, self.code))


def execute(*command: str, **environment: str) -> str:
    """Run a program that must succeed; returns what it printed."""
    finished = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
        env={**os.environ, **environment},
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@functools.cache
def built_objects() -> dict[str, Path]:
    """Object file of every kernel source, by the name of the source."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    configure = ("-S", str(ROOT), "-G", "Ninja", "-B", str(BUILD), f"-DPython_EXECUTABLE={sys.executable}")
    execute("cmake", *configure, PATH=path)
    execute("cmake", "--build", str(BUILD), "--target", "interlace_sass", "-j2", PATH=path)
    objects = {path.name.removesuffix(".o"): path for path in BUILD.rglob("*.cu.o")}
    sources = (ROOT / "csrc" / "cuda" / "kernels").glob("*.cu")
    return {source.name: objects[source.name] for source in sorted(sources)}


def compile_kernels(source: Path, output: Path, architecture: str = "90a") -> None:
    """Compile one kernel file as CMake does; its includes are found in the csrc folder it lies in, or in ours."""
    csrc = next((folder for folder in source.parents if folder.name == "csrc"), ROOT / "csrc")
    target = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    options = (
        "-std=c++20",
        "-O3",
        "--expt-relaxed-constexpr",
        "-Wno-deprecated-gpu-targets",
        target,
        f"-I{csrc}",
    )
    execute(str(find_tool("nvcc")), *options, "-c", str(source), "-o", str(output))


@functools.cache
def kernels_of(compiled: Path) -> tuple[Kernel, ...]:
    """All kernels of an object file, for all architectures it was built for."""
    cuobjdump = str(find_tool("cuobjdump"))
    resources: dict[tuple[str, str], tuple[int, int]] = {}
    for architecture, text in _by_architecture(execute(cuobjdump, "--dump-resource-usage", str(compiled))):
        for match in re.finditer(r"Function (\w+):\s+REG:(\d+) STACK:(\d+)", text):
            resources[architecture, match[1]] = (int(match[2]), int(match[3]))
    kernels = []
    for architecture, text in _by_architecture(execute(cuobjdump, "-sass", str(compiled))):
        for function in text.split("Function : ")[1:]:
            name, code = function.split("\n", 1)
            registers, stack = resources[architecture, name]
            addresses = tuple(
                int(at, 16) for at in re.findall(r"^\s+/\*([0-9a-f]{4,8})\*/", code, re.MULTILINE)
            )
            instructions = re.sub(r"/\*[^*]*\*/", "", code)  # addresses and encodings
            kernels.append(Kernel(name, architecture, registers, stack, instructions, addresses))
    assert kernels, f"no kernel in {compiled.name}"
    return tuple(kernels)


def highest_registers(kernel: Kernel) -> list[tuple[int, int]]:
    """(registers per thread, highest number used) from each setmaxnreg on, until the next one on every way."""
    instructions = [line.strip() for line in kernel.code.split(";")[:-1]]
    assert len(instructions) == len(kernel.addresses), kernel.name
    at = {address: i for i, address in enumerate(kernel.addresses)}
    moves = {i: text for i, text in enumerate(instructions) if "USETMAXREG" in text}
    found = []
    for start, text in moves.items():
        seen, ahead = {start}, [*_next(start, instructions, at)]
        while ahead:
            i = ahead.pop()
            if i not in seen and i not in moves:
                seen.add(i)
                ahead += _next(i, instructions, at)
        found.append((int(text.rsplit("0x", 1)[1], 16), max(_highest(instructions[i]) for i in seen)))
    return found


def _next(i: int, instructions: list[str], at: dict[int, int]) -> list[int]:
    """Where the instruction may lead: on, and to the address it names. What a call returns to is the next one."""
    text = instructions[i]
    after = []
    target = re.search(r"\b(?:BRA|CALL|BREAK|WARPSYNC\.COLLECTIVE)\b.*\b0x([0-9a-f]+)$", text)
    if target is not None:
        after.append(at[int(target[1], 16)])
    ends = re.match(r"(?:BRA(?!\.DIV|\.U\.ANY| U?P\d)|EXIT\b|RET\b)", text) is not None
    return after if ends else [*after, i + 1]


def _highest(text: str) -> int:
    """The highest register of an instruction, pairs and the accumulators of a product counted whole."""
    used = [
        int(number) + (1 if ".64" in kind else 0)
        for number, kind in re.findall(r"\bR(\d+)((?:\.\w+)*)", text)
    ]
    product = re.search(r"GMMA\.64x(\d+)x\d+\S* R(\d+)", text)
    if product is not None:
        used.append(int(product[2]) + int(product[1]) // 2 - 1)
    vector = re.search(r"\bLD\w*\.\S*\b(64|128)\b\S* R(\d+)", text)
    if vector is not None:
        used.append(int(vector[2]) + int(vector[1]) // 32 - 1)
    return max(used, default=-1)


def _by_architecture(listing: str) -> list[tuple[str, str]]:
    """Parts of a listing of cuobjdump that hold machine code, each with its architecture."""
    parts = listing.split("Fatbin elf code:")[1:]
    found = []
    for part in parts:
        match = re.search(r"arch = (sm_\d+)", part)
        assert match is not None, part[:200]
        found.append((match[1], part))
    return found
