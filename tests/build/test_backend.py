"""The build backend: what it asks pip for, and the one line it prints when something is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import venv
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).parents[2]
BACKEND = ROOT / "build_backend"
SITE = Path(setuptools.__file__).parents[1]


class Environment:
    """A virtual environment without packages, and a folder in the place of pip's isolated one."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder / "target", with_pip=False)
        self.python = folder / "target" / "bin" / "python"
        self.site = next((folder / "target" / "lib").glob("python*")) / "site-packages"
        self.isolated = folder / "isolated"
        self.isolated.mkdir()
        for found in [*SITE.glob("setuptools*"), *SITE.glob("_distutils_hack")]:
            (self.isolated / found.name).symlink_to(found)
        self.tools = folder / "tools"
        self.tools.mkdir()

    def give_torch(self, where: Path, version: str, cuda: str | None = None) -> None:
        """What the backend reads of a torch: a folder with version.py."""
        (where / "torch").mkdir()
        (where / "torch" / "__init__.py").write_text("raise ImportError('the build must not import torch')\n")
        (where / "torch" / "version.py").write_text(f"__version__ = {version!r}\ncuda = {cuda!r}\n")

    def give_tool(self, name: str) -> None:
        found = shutil.which(name)
        assert found, f"{name} is needed to run the tests of the build"
        (self.tools / name).symlink_to(found)

    def call(self, expression: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Evaluate an expression of the backend as pip does: own process, PYTHONPATH leading elsewhere."""
        environment = {
            **{k: v for k, v in os.environ.items() if k not in ("CXX", "PYTHONHOME")},
            "PYTHONPATH": f"{BACKEND}:{self.isolated}",
            "PATH": str(self.tools),
            **variables,
        }
        code = f"import interlace_build as backend, toolchain; print({expression})"
        return subprocess.run(
            [self.python, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path)


def fails_with(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode != 0
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("interlace: ")
    for word in words:
        assert word in lines[0]


REQUIRES = "backend.get_requires_for_build_wheel()"


def test_torch_is_a_build_requirement_when_there_is_none(environment):
    """Without it `pip install .` fails in a fresh environment."""
    environment.give_tool("g++")
    result = environment.call(REQUIRES)
    assert result.stdout.strip().splitlines()[-1:] == ["['torch>=2.11']"], result.stderr


def test_an_installed_torch_is_used_and_not_asked_for(environment):
    """Asking for it would make pip fetch a second torch, gigabytes, and build against that one."""
    environment.give_tool("g++")
    environment.give_torch(environment.site, "2.13.0+cpu")
    for hook in (REQUIRES, "backend.get_requires_for_build_editable()"):
        result = environment.call(hook)
        assert result.stdout.strip().splitlines()[-1:] == ["[]"], result.stderr


def test_the_torch_of_the_target_comes_before_one_of_the_build_environment(environment):
    """pip hides the target behind PYTHONPATH; a torch found only there is the wrong one."""
    environment.give_torch(environment.site, "2.14.1+cu130", "13.0")
    environment.give_torch(environment.isolated, "2.12.0")
    found = environment.call("toolchain.find_torch()")
    assert "2.14.1+cu130" in found.stdout and "'13.0'" in found.stdout, found.stderr
    assert str(environment.site) in found.stdout


def test_a_torch_that_came_as_build_requirement_is_found(environment):
    """The second hook must see what the first one asked for."""
    environment.give_torch(environment.isolated, "2.14.1")
    found = environment.call("toolchain.find_torch()")
    assert str(environment.isolated) in found.stdout, found.stderr


def test_an_old_torch_is_named_and_left_alone(environment):
    """Building against it would fail on a missing header, in hundreds of lines."""
    environment.give_tool("g++")
    environment.give_torch(environment.site, "2.4.1")
    fails_with(environment.call(REQUIRES), "torch 2.4.1", "torch >= 2.11", "pip install")


def test_a_missing_compiler_is_one_line_before_anything_is_fetched(environment):
    """The first hook must say it: after it pip may download torch for nothing."""
    fails_with(environment.call(REQUIRES), "no C++ compiler", "apt-get install g++")


def test_a_compiler_that_cxx_names_wrongly_is_told(environment):
    """CMake would say it in twenty lines."""
    environment.give_tool("g++")
    fails_with(environment.call(REQUIRES, CXX="no-such-c++ -m64"), "CXX=no-such-c++")


@pytest.mark.parametrize(
    "hook",
    [
        "backend.prepare_metadata_for_build_wheel('.')",
        "backend.prepare_metadata_for_build_editable('.')",
        "backend.build_wheel('.')",
        "backend.build_editable('.')",
    ],
)
def test_everything_that_is_missing_is_in_one_line(environment, hook):
    """Without isolation each of these hooks can be the first; one line a run would take four runs."""
    environment.give_tool("g++")
    fails_with(environment.call(hook), "'cmake>=3.25'", "'ninja'", "'pybind11>=2.13'", "'torch>=2.11'")


def test_only_what_is_missing_is_named(environment):
    """A line that always names everything would send users after things they have."""
    for tool in ("g++", "cmake", "make"):
        environment.give_tool(tool)
    environment.give_torch(environment.site, "2.13.0")
    result = environment.call("backend.build_wheel('.')")
    fails_with(result, "pip install 'pybind11>=2.13' (")


def test_an_old_setuptools_is_named(environment):
    """A fresh venv of Python 3.11 has setuptools 65, which rejects pyproject.toml in ninety lines."""
    old = environment.site / "setuptools-65.5.0.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: setuptools\nVersion: 65.5.0\n")
    for link in environment.isolated.glob("setuptools-*"):
        link.unlink()
    fails_with(environment.call(REQUIRES), "setuptools 65.5.0 is too old", "setuptools>=77")


def test_a_missing_setuptools_is_named(environment):
    """A fresh venv of Python 3.12 has none."""
    for link in environment.isolated.iterdir():
        link.unlink()
    fails_with(environment.call(REQUIRES), "setuptools not found", "setuptools>=77")
