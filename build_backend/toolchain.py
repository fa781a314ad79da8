"""What a build needs (compiler, CMake, pybind11, torch) and one clear line for each thing that is missing."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

import target_torch

MINIMUM_TORCH = (2, 11)  # the first with the stable ABI that the op libraries are written against
MINIMUM_CMAKE = (3, 25)
MINIMUM_SETUPTOOLS = (77, 0)  # the first that reads an SPDX licence in pyproject.toml


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
    """Stop the build with one line: neither pip nor setuptools decorates a SystemExit."""
    raise SystemExit(f"interlace: {message}")


def find_torch() -> Torch | None:
    """The torch of the target environment, else the one in the (isolated) build environment, else None."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONNOUSERSITE")}
    script = str(Path(target_torch.__file__).resolve())
    answer = subprocess.run(
        [sys.executable, "-E", script], env=environment, check=False, capture_output=True, text=True
    )
    fields = tuple(answer.stdout.strip().split(";")) if answer.returncode == 0 else ("", "", "")
    if not fields[0]:
        fields = target_torch.find_torch()
    if not fields[0]:
        return None
    torch = Torch(*fields)
    if _number(torch.version) < MINIMUM_TORCH:
        fail(f"torch {torch.version} is installed, but torch >= 2.11 is needed: pip install 'torch>=2.11'")
    return torch


def require_setuptools() -> None:
    """A setuptools that can read our pyproject.toml; a fresh venv has an older one or none at all."""
    try:
        found = version("setuptools")
    except PackageNotFoundError:
        found = ""
    if _number(found) < MINIMUM_SETUPTOOLS:
        state = f"setuptools {found} is too old" if found else "setuptools not found"
        fail(f"{state}: pip install 'setuptools>=77' (or drop --no-build-isolation)")


def require_compiler() -> None:
    """A C++ compiler and Python's headers."""
    named = os.environ.get("CXX", "").split()[:1]
    if not any(shutil.which(compiler) for compiler in named or ("c++", "g++", "clang++")):
        state = f"CXX={named[0]} is not there" if named else "no C++ compiler found"
        fail(f"{state}: install GCC 11+ (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++)")
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        fail("Python.h is missing: install Python's headers (Debian, Ubuntu: apt-get install python3-dev)")


def require_all() -> Tools:
    """Check the whole toolchain; one line names everything that is missing."""
    require_compiler()
    cmake, generator, pybind11, torch = _find_cmake(), _generator(), _find_pybind11(), find_torch()
    needed = {"cmake>=3.25": cmake, "ninja": generator, "pybind11>=2.13": pybind11, "torch>=2.11": torch}
    missing = [f"'{package}'" for package, found in needed.items() if not found]
    if not (cmake and generator and pybind11 and torch):
        fail(f"the build needs more packages: pip install {' '.join(missing)} (or drop --no-build-isolation)")
    return Tools(cmake, generator, pybind11, torch)


def jobs() -> str:
    """Compilers to run at once: MAX_JOBS, else the cores this process may use."""
    return os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))


def _find_cmake() -> str | None:
    for candidate in _candidates("cmake"):
        answer = subprocess.run([candidate, "--version"], check=False, capture_output=True, text=True)
        if answer.returncode == 0 and _number(answer.stdout) >= MINIMUM_CMAKE:
            return candidate
    return None


def _generator() -> list[str]:
    ninja = _candidates("ninja")
    if ninja:
        return ["-GNinja", f"-DCMAKE_MAKE_PROGRAM={ninja[0]}"]
    return ["-GUnix Makefiles"] if shutil.which("make") else []


def _find_pybind11() -> str | None:
    try:
        import pybind11
    except ImportError:
        return None
    return pybind11.get_cmake_dir()


def _candidates(program: str) -> list[str]:
    """PATH first (an isolated build puts its tools there), then beside the interpreter (inactive venv)."""
    beside = os.path.dirname(sys.executable)
    return list(dict.fromkeys(filter(None, (shutil.which(program), shutil.which(program, path=beside)))))


def _number(text: str) -> tuple[int, int]:
    match = re.search(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)
