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
TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class Kernel:
    """One kernel for one architecture: what it needs and its instructions, as text."""

    name: str  # mangled
    architecture: str  # "sm_90"
    registers: int
    stack: int  # bytes of local memory per thread: arrays indexed at run time, and spills
    code: str

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
            instructions = re.sub(r"/\*[^*]*\*/", "", code)  # addresses and encodings
            kernels.append(Kernel(name, architecture, registers, stack, instructions))
    assert kernels, f"no kernel in {compiled.name}"
    return tuple(kernels)


def _by_architecture(listing: str) -> list[tuple[str, str]]:
    """Parts of a listing of cuobjdump that hold machine code, each with its architecture."""
    parts = listing.split("Fatbin elf code:")[1:]
    found = []
    for part in parts:
        match = re.search(r"arch = (sm_\d+)", part)
        assert match is not None, part[:200]
        found.append((match[1], part))
    return found
