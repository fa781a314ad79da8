"""The package as a user gets it: built in isolation from a copy of the tree, unpacked, installed and run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv*", "build", "dist", "*.so", "__pycache__", "*.egg-info", ".*_cache"
)


def copy_of_the_tree(folder: Path) -> Path:
    """Sources only: a build must not profit from what an earlier one left behind."""
    shutil.copytree(ROOT, folder, ignore=LEFT_OUT, symlinks=True)
    (folder / "python/interlace/build_info.json").unlink(missing_ok=True)
    return folder


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_source_distribution_is_complete(tmp_path):
    """setuptools knows nothing of CMake: without MANIFEST.in an sdist has no C++ and builds nothing."""
    tree = copy_of_the_tree(tmp_path / "tree")
    backend = "import interlace_build as backend; print(backend.build_sdist('dist'))"
    printed = run(sys.executable, "-c", backend, cwd=tree, PYTHONPATH=str(tree / "build_backend"))
    with tarfile.open(tree / "dist" / printed.strip().splitlines()[-1]) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    wanted = [
        p for folder in ("csrc", "cmake", "build_backend", "python") for p in (tree / folder).rglob("*.*")
    ]
    sources = [
        p.relative_to(tree).as_posix() for p in wanted if p.suffix not in {".pyc", ".txt"} and p.is_file()
    ]
    assert len(sources) > 50
    missing = {"CMakeLists.txt", "setup.py", "pyproject.toml", "LICENSE", *sources} - names
    assert not {name for name in missing if "egg-info" not in name}


@pytest.mark.slow
def test_an_isolated_build_uses_the_installed_torch_and_its_wheel_runs(tmp_path):
    """The path users take and developers do not: pip's build environment, then a wheel in a fresh venv."""
    tree = copy_of_the_tree(tmp_path / "tree")
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    site = next((tmp_path / "venv" / "lib").glob("python*")) / "site-packages"
    (site / "torch_of_the_test.pth").write_text(str(Path(torch.__file__).parents[1]) + "\n")

    log = tmp_path / "pip.log"
    run(
        *(python, "-m", "pip", "wheel", ".", "--no-deps", "--wheel-dir", tmp_path / "wheels", "--log", log),
        cwd=tree,
        CMAKE_ARGS="-DINTERLACE_CUDA=OFF",
    )
    assert "Collecting torch" not in log.read_text(), "pip fetched a second torch into the build environment"

    (wheel,) = (tmp_path / "wheels").iterdir()
    abi = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert f"-{abi}-{abi}-linux_" in wheel.name, "the wheel must be tied to one CPython: _C is"
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in ("py.typed", "cli.py", "build_info.json", "libinterlace_runtime.so", "interlace_cpu.so"):
        assert f"interlace/{name}" in names
    assert any(re.fullmatch(r"interlace/_C\..*\.so", name) for name in names)
    assert not [name for name in names if name.startswith(("tests/", "csrc/", "build_backend/"))]

    run(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    report = json.loads(run(tmp_path / "venv" / "bin" / "interlace", "doctor", "--json", cwd=tmp_path))
    assert report["native"]["error"] is None
    assert report["build"]["folder"].startswith(str(site))
    assert report["build"]["built_against_torch"] == report["versions"]["torch"] == torch.__version__
    assert report["build"]["cuda"] == "INTERLACE_CUDA=OFF"
    for library in (site / "interlace").glob("*.so"):
        assert str(tmp_path).encode() not in library.read_bytes(), f"{library.name} holds a path of the build"
