"""Runs CMake and puts what it built into the package; CMakeLists.txt owns every rule of the native build."""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
sys.path.insert(0, str(ROOT / "build_backend"))

import toolchain  # noqa: E402  (beside the backend; `python setup.py` alone does not have it on sys.path)


class CMakeBuild(build_ext):
    """Configure, build and install the native libraries into the package folder.

    INTERLACE_BUILD_DIR names the CMake folder (kept between builds), CMAKE_ARGS adds options, MAX_JOBS limits
    the number of compilers that run at once.
    """

    def run(self) -> None:
        tools = toolchain.require_all()
        package = ROOT / "python/interlace" if self.inplace else Path(self.build_lib).resolve() / "interlace"
        build = Path(os.environ.get("INTERLACE_BUILD_DIR") or self._default_build_dir()).resolve()
        configure = [
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DINTERLACE_TORCH_DIR={tools.torch.folder}",
            f"-Dpybind11_DIR={tools.pybind11}",
            *tools.generator,
            *os.environ.get("CMAKE_ARGS", "").split(),
        ]
        self._cmake(
            tools.cmake, "-S", str(ROOT), "-B", str(build), *self._fresh(build, configure), *configure
        )
        self._cmake(
            tools.cmake, "--build", str(build), "--target", "interlace_all", "--parallel", toolchain.jobs()
        )
        # Unlink first: a library of an earlier build must not slip into the wheel, and a running process that
        # has the old file mapped keeps its own copy.
        for stale in [*package.glob("*.so"), *package.glob("build_info.json")]:
            stale.unlink()
        self._cmake(
            tools.cmake, "--install", str(build), "--prefix", str(package), "--component", "interlace"
        )

    def get_outputs(self) -> list[str]:
        return []  # CMake decides which files there are; the whole package folder is copied

    def _default_build_dir(self) -> Path:
        if self.inplace:
            return ROOT / "build" / f"editable-{sys.implementation.cache_tag}"
        return Path(self.build_temp) / "cmake"

    @staticmethod
    def _fresh(build: Path, configure: list[str]) -> list[str]:
        """Drop the cache of a folder configured differently: isolated builds leave dead paths behind."""
        record = build / "configure.txt"
        text = "\n".join(configure)
        if record.is_file() and record.read_text() == text:
            return []
        build.mkdir(parents=True, exist_ok=True)
        record.write_text(text)
        return ["--fresh"]

    @staticmethod
    def _cmake(cmake: str, *arguments: str) -> None:
        if subprocess.run([cmake, *arguments], check=False).returncode:
            raise SystemExit(f"interlace: `cmake {arguments[0]}` failed; the reason is printed above")


setup(ext_modules=[Extension("interlace._C", [])], cmdclass={"build_ext": CMakeBuild})
