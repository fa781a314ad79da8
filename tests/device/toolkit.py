"""Where the CUDA toolkit is, if it is. A toolkit is enough to compile; nothing here needs a GPU."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path


def find_tool(tool: str) -> str | None:
    """Path of a program of the toolkit: the toolkit's own before one on PATH, which may be a wrapper."""
    if tool == "nvcc" and os.environ.get("CUDACXX"):
        return os.environ["CUDACXX"]
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if home and (path := Path(home) / "bin" / tool).exists():
            return str(path)
    return shutil.which(tool) or _find_in_packages(tool)


def _find_in_packages(tool: str) -> str | None:
    """A program of NVIDIA's Python packages, which lie in the folder nvidia/cuNN/bin."""
    packages = importlib.util.find_spec("nvidia")
    for folder in (packages.submodule_search_locations if packages else None) or ():
        for path in sorted(Path(folder).glob(f"cu*/bin/{tool}")):
            return str(path)
    return None


def toolkit_folder() -> Path | None:
    """Folder with include/cuda_runtime.h and the runtime library; None when there is no complete toolkit."""
    nvcc = find_tool("nvcc")
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    if nvcc is not None:
        candidates.append(str(Path(nvcc).resolve().parents[1]))
    for candidate in candidates:
        if candidate and (Path(candidate) / "include" / "cuda_runtime.h").exists():
            return Path(candidate)
    return None
