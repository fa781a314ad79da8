"""How near the ranks' cores are to each other right now: a hypervisor moves them between caches."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from interlace.bench.summary import percentile

__all__ = ["NEAR_BYTES_PER_SECOND", "peer_read_bandwidth"]

PROBE_BYTES = 512 << 10  # fits the second-level cache of the core that wrote it
ROUNDS = 15
# What a core of the same last-level cache has just written comes at 60 GB/s and more, from another cache at
# 30 to 40. The cost of an all-reduce differs by a factor of 2 to 3 between the two.
NEAR_BYTES_PER_SECOND = 50e9


def peer_read_bandwidth(barrier: Callable[[], None]) -> float | None:
    """Bytes per second at which a rank copies what the next has just written; rank 0's median, None alone.

    Collective, takes a few milliseconds; a temporary file mapped by all ranks is the memory.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return None
    with tempfile.TemporaryDirectory() as folder:
        names: list[str] = [str(Path(folder) / "probe")]
        dist.broadcast_object_list(names, 0)
        if rank == 0:
            Path(names[0]).write_bytes(bytes(world_size * PROBE_BYTES))
        dist.barrier()
        shared = torch.from_file(names[0], shared=True, size=world_size * PROBE_BYTES, dtype=torch.uint8)
        own, peer = shared.view(world_size, -1)[rank], shared.view(world_size, -1)[(rank + 1) % world_size]
        private = torch.empty_like(peer)
        seconds = []
        for turn in range(ROUNDS):
            own.fill_(turn)
            barrier()
            begin = time.perf_counter()
            private.copy_(peer)
            seconds.append(time.perf_counter() - begin)
            barrier()
    rate = torch.tensor(PROBE_BYTES / percentile(seconds, 0.5), dtype=torch.float64)
    dist.broadcast(rate, 0)
    return float(rate)
