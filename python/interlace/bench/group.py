"""The process group of a benchmark or of the demo."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

__all__ = ["join", "leave"]

TIMEOUT = timedelta(
    minutes=5
)  # far beyond any step of a benchmark; a rank that is lost is reported within it


def join(place: Mapping[str, Any] | None = None) -> None:
    """Set up the process group, gloo (and NCCL for CUDA tensors): from `launch`'s place, mpiexec's, or torchrun's.

    torchrun's environment counts without a place. With a "store", a file, MPI says which rank this is.
    """
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    if place is None:
        dist.init_process_group(backend, timeout=TIMEOUT)
        return
    if "store" in place:
        from mpi4py import MPI

        file = dist.FileStore(place["store"], place["world_size"])
        rank = MPI.COMM_WORLD.Get_rank()
        dist.init_process_group(
            backend, store=file, rank=rank, world_size=place["world_size"], timeout=TIMEOUT
        )
        return
    store = TCPStore(
        "127.0.0.1",
        place["port"],
        place["world_size"],
        is_master=place["rank"] == 0,
        timeout=TIMEOUT,
        master_listen_fd=place.get("listen_fd"),
    )
    dist.init_process_group(
        backend, store=store, rank=place["rank"], world_size=place["world_size"], timeout=TIMEOUT
    )


def leave() -> None:
    """Destroy the process group; left to the interpreter's exit, gloo's threads abort the process. Ends MPI as well."""
    if dist.is_initialized():
        dist.destroy_process_group()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
