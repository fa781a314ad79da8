"""What a build needs (compiler, CMake, pybind11, torch) and one clear line for each thing that is missing."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import target_torch

MINIMUM_TORCH = (2, 11)  # the first with the stable ABI that the op libraries are written against
MINIMUM_CMAKE = (3, 25)


@dataclass(frozen=True)
class Torch:
    """An installed torch: its package folder, version and the CUDA it was built for ('' for a CPU build)."""

    folder: str
    version: str
    cuda: str


@dataclass(frozen=True)
class Tools:
    """Everything setup.py hands to CMake."""

    cmake: str
    generator: list[str]
    pybind11: str
    torch: Torch


def fail(message: str) -> NoReturn:
    """Stop the build with one line. SystemExit is the one exception that neither pip nor setuptools decorates."""
    raise SystemExit(f"interlace: {message}")


def find_torch() -> Torch | None:
    """The torch of the target environment, else the one in the (isolated) build environment, else None."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONNOUSERSITE")}
    script = str(Path(target_torch.__file__).resolve())
    answer = subprocess.run([sys.executable, "-E", script], env=environment, capture_output=True, text=True)
    fields = tuple(answer.stdout.strip().split(";")) if answer.returncode == 0 else ("", "", "")
    if not fields[0]:
        fields = target_torch.find_torch()
    if not fields[0]:
        return None
    torch = Torch(*fields)
    if _version(torch.version) < MINIMUM_TORCH:
        fail(f"torch {torch.version} is installed, but torch >= 2.11 is needed: pip install 'torch>=2.11'")
    return torch


def require_compiler() -> None:
    """A C++ compiler and Python's headers."""
    compiler = os.environ.get("CXX", "").split()[:1]
    found = shutil.which(compiler[0]) if compiler else next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if not found:
        wanted = f"CXX={compiler[0]} is not there" if compiler else "no C++ compiler found"
        fail(f"{wanted}: install one with C++20 (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++)")
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        fail("Python.h is missing: install Python's headers (Debian, Ubuntu: apt-get install python3-dev)")


def require_all() -> Tools:
    """Check the whole toolchain; the first thing that is missing ends the build."""
    require_compiler()
    cmake = _find_cmake()
    if not cmake:
        fail("cmake >= 3.25 not found: pip install cmake ninja")
    try:
        import pybind11
    except ImportError:
        fail("pybind11 not found: pip install 'pybind11>=2.13' (or build without --no-build-isolation)")
    torch = find_torch()
    if torch is None:
        fail("torch not found: pip install 'torch>=2.11' (or build without --no-build-isolation)")
    return Tools(cmake, _generator(), pybind11.get_cmake_dir(), torch)


def jobs() -> str:
    """Compilers to run at once: MAX_JOBS, else the cores this process may use."""
    return os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))


def _find_cmake() -> str | None:
    for candidate in _candidates("cmake"):
        answer = subprocess.run([candidate, "--version"], capture_output=True, text=True)
        if answer.returncode == 0 and _version(answer.stdout) >= MINIMUM_CMAKE:
            return candidate
    return None


def _generator() -> list[str]:
    ninja = _candidates("ninja")
    if ninja:
        return ["-GNinja", f"-DCMAKE_MAKE_PROGRAM={ninja[0]}"]
    if not shutil.which("make"):
        fail("neither ninja nor make found: pip install ninja")
    return ["-GUnix Makefiles"]


def _candidates(program: str) -> list[str]:
    """PATH first (an isolated build puts its own tools there), then beside the interpreter (venv not activated)."""
    beside = os.path.dirname(sys.executable)
    return list(dict.fromkeys(filter(None, (shutil.which(program), shutil.which(program, path=beside)))))


def _version(text: str) -> tuple[int, int]:
    match = re.search(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)
