"""The native parts: `_C` (host-side objects) and the op library. Imported first; everything else builds on it."""

from __future__ import annotations

from pathlib import Path

import torch

from .config import settings

__all__ = ["CUDA_LIBRARY", "_C"]

_FOLDER = Path(__file__).parent

try:
    from . import _C
except ImportError as error:
    raise ImportError(
        f"interlace: the native library is missing or does not load ({error}); install again with "
        "`pip install .` in an environment that has torch and a C++ compiler"
    ) from error

torch.ops.load_library(str(_FOLDER / "interlace_cpu.so"))

# the CUDA half needs a CUDA build of torch: its libraries (libcudart) come with it
CUDA_LIBRARY = _FOLDER / "interlace_cuda.so"
if torch.version.cuda is not None and CUDA_LIBRARY.exists():
    torch.ops.load_library(str(CUDA_LIBRARY))

if settings.isa:
    torch.ops.interlace.cap_isa(settings.isa)
