"""DeepSpeed's all-reduce over shared memory, built on first use, without the rest of DeepSpeed's set-up."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["load"]

Reduce = Callable[[Tensor], Tensor]
_held: list[Reduce] = []  # the library sets itself up once in a process, whoever asks


def load() -> tuple[Reduce | None, str]:
    """The in-place all-reduce of all ranks, or None and why there is none. Collective; builds with ninja and a C++
    compiler, which takes half a minute the first time.

    The segments it makes are unlinked at once: nothing is left in /dev/shm, however the ranks end.
    """
    if _held:
        return _held[0], ""
    module, reason = _built()
    failed: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(failed, reason)
    if any(failed) or module is None:
        return None, next(str(text) for text in failed if text)
    port = torch.tensor(os.getpid())
    dist.broadcast(port, 0)
    _tell({"LOCAL_SIZE": dist.get_world_size(), "MASTER_ADDR": "interlace", "MASTER_PORT": int(port)})
    module.initialize(dist.get_world_size(), dist.get_rank())
    all_reduce: Reduce = torch.ops.deepspeed.inference_all_reduce_
    all_reduce(torch.zeros(64))  # everybody has mapped everybody
    dist.barrier()
    if dist.get_rank() == 0:
        for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_interlace_{int(port)}_*"):
            path.unlink(missing_ok=True)
    _held.append(all_reduce)
    return all_reduce, ""


def _built() -> tuple[Any, str | None]:
    """The first rank builds, the others find it built."""
    module, reason = None, None
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it warns that a machine without a GPU has no GPU
    try:
        for turn in range(2):
            if (dist.get_rank() == 0) == (turn == 0):
                module, reason = _build()
            dist.barrier()
    finally:
        logging.disable(disabled)
    return module, reason


def _build() -> tuple[Any, str | None]:
    try:
        from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

        module: Any = ShareMemCommBuilder().load(verbose=False)
        level = module.vector_kernel_level() if hasattr(module, "vector_kernel_level") else 2
        return module, None if level >= 2 else "its kernels need AVX-512"
    except Exception as error:  # whatever its builder or the compiler raises is the reason it is absent
        return None, f"does not build: {(str(error) or type(error).__name__).splitlines()[0]}"


def _tell(values: dict[str, object]) -> None:
    """Its C++ looks into the environment of the process for these; Python's copy of it is left alone."""
    library = ctypes.CDLL(None)
    for name, value in values.items():
        library.setenv(name.encode(), str(value).encode(), 1)
