"""The process group of a benchmark or of the demo."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

__all__ = ["join", "leave"]

TIMEOUT = timedelta(
    minutes=5
)  # far beyond any step of a benchmark; a rank that is lost is reported within it


def join(place: Mapping[str, int] | None = None) -> None:
    """Set up the gloo process group: from `launch`'s place, or from torchrun's environment without one."""
    if place is None:
        dist.init_process_group("gloo", timeout=TIMEOUT)
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
        "gloo", store=store, rank=place["rank"], world_size=place["world_size"], timeout=TIMEOUT
    )


def leave() -> None:
    """Destroy the process group; left to the interpreter's exit, gloo's threads abort the process."""
    if dist.is_initialized():
        dist.destroy_process_group()
