"""Versions of everything a result depends on, and what the build put into this package."""

from __future__ import annotations

import importlib.util
import json
import platform
import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

__all__ = ["build", "nvcc_version", "versions"]

PACKAGE = Path(__file__).resolve().parents[1]
LIBRARIES = ("libinterlace_runtime.so", "interlace_cpu.so", "interlace_cuda.so")


def versions() -> dict[str, object]:
    """Versions found now; None for what is not there."""
    try:
        own: str | None = version("interlace")
    except PackageNotFoundError:
        own = None
    return {
        "interlace": own,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "nccl": _nccl_version(),
        "nvcc": nvcc_version(),
        "compiler": _build_info().get("compiler"),
    }


def build() -> dict[str, object]:
    """What the build produced: libraries present, instruction sets, CUDA or the reason why not."""
    info = _build_info()
    bindings = importlib.util.find_spec("interlace._C")
    return {
        "folder": str(PACKAGE),
        "libraries": [name for name in LIBRARIES if (PACKAGE / name).is_file()],
        "bindings": Path(bindings.origin).name if bindings and bindings.origin else None,
        "isa_levels": str(info.get("isa_levels", "")).split(";") if info else [],
        "built_against_torch": info.get("torch"),
        "build_type": info.get("build_type"),
        "cuda": info.get("cuda", "unknown: build_info.json is missing, so the package was not built"),
        "cuda_archs": str(info.get("cuda_archs", "")).split(";") if info.get("cuda") == "built" else [],
        "nvcc_at_build": info.get("nvcc") or None,
    }


def nvcc_version() -> str | None:
    """Version of the nvcc on PATH, None when there is none."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    answer = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=20, check=False)
    match = re.search(r"V(\d+\.\d+\.\d+)", answer.stdout)
    return match[1] if match else None


def _nccl_version() -> str | None:
    if torch.version.cuda is None or not torch.distributed.is_nccl_available():
        return None
    number: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, number))


def _build_info() -> dict[str, str]:
    path = PACKAGE / "build_info.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
