"""Memory of a group in which ranks read and write each other's tensors in place, on one host.

A window is one anonymous file a rank, mapped by all. It holds what no op carries: blocks that a peer works on for
long, such as keys and values. The ops of the group are its barriers.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from . import symmetric_memory
from .groups import GroupInfo

__all__ = ["Window", "window", "window_bytes"]

_ALIGNMENT = 4096


@dataclass
class Window:
    """What every rank shares: `parts[r]` are the bytes of rank r, uint8 [capacity]."""

    parts: list[Tensor]

    @property
    def capacity(self) -> int:
        return self.parts[0].numel()

    def tensor(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The tensor that lies at byte `offset` in the part of `rank`, a view."""
        count = int(torch.Size(shape).numel()) * dtype.itemsize
        return self.parts[rank].narrow(0, offset, count).view(dtype).view(shape)


_windows: dict[str, Window] = {}


def window(info: GroupInfo, nbytes: int) -> Window:
    """The group's window, of at least `nbytes` a rank. Collective when it has to grow, so `nbytes` is rank-equal.

    What it held is lost when it grows. The caller keeps ranks apart: nobody writes what a peer may still read.
    Raises RuntimeError on every rank when a rank cannot get the memory.
    """
    found = _windows.get(info.name)
    if found is not None and found.capacity >= nbytes:
        return found
    if found is None:
        symmetric_memory.on_release(info.name, lambda: _windows.pop(info.name, None) and None)
    capacity = -(-max(nbytes, _ALIGNMENT) // _ALIGNMENT) * _ALIGNMENT
    _windows[info.name] = opened = _open(info, capacity)
    return opened


def window_bytes(name: str) -> int:
    """Bytes of this rank's part of the group's window; 0 without one."""
    found = _windows.get(name)
    return 0 if found is None else found.capacity


def _open(info: GroupInfo, capacity: int) -> Window:
    process_group = _resolve_process_group(info.name)
    own, descriptors = -1, [-1] * info.world_size
    parts: list[Tensor] = []
    try:
        with symmetric_memory.agreed(process_group, info.name):
            own = os.memfd_create("interlace-window", os.MFD_CLOEXEC)
            os.posix_fallocate(own, 0, capacity)  # no SIGBUS later when memory is short
        with symmetric_memory.agreed(process_group, info.name):
            descriptors = symmetric_memory.pass_descriptors(process_group, own)
            for rank in range(info.world_size):
                descriptor = own if rank == info.rank else descriptors[rank]
                parts.append(torch.frombuffer(mmap.mmap(descriptor, capacity), dtype=torch.uint8))
    finally:
        for descriptor in (own, *descriptors):
            if descriptor >= 0:
                os.close(descriptor)
    return Window(parts)
