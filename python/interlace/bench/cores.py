"""Which core each rank runs on, and how many threads torch uses there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["Placement", "available_cores", "place", "release", "spread", "whole_machine"]


@dataclass(frozen=True)
class Placement:
    """Cores of this machine the ranks share; `core` is this rank's own, None when ranks outnumber cores.

    allowed: what the thread might use before it was placed.
    """

    cores: tuple[int, ...]
    core: int | None
    world_size: int
    allowed: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.core is None:
            return f"{self.world_size} ranks share {len(self.cores)} core(s), not pinned, 1 torch thread each"
        return (
            f"{self.world_size} ranks pinned to cores {', '.join(map(str, self.cores))}, 1 torch thread each"
        )


def _siblings(core: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(core)


def spread(cores: Sequence[int], siblings: Sequence[str]) -> list[int]:
    """The cores, one hardware thread of each physical core first: two ranks on one core halve each other."""
    seen: set[str] = set()
    first: list[int] = []
    rest: list[int] = []
    for core, key in zip(cores, siblings, strict=True):
        (rest if key in seen else first).append(core)
        seen.add(key)
    return first + rest


def available_cores() -> list[int]:
    """Cores this process may use, one per physical core first."""
    if hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))
    else:
        cores = list(range(os.cpu_count() or 1))
    return spread(cores, [_siblings(core) for core in cores])


def place(rank: int, world_size: int) -> Placement:
    """Give this rank one core and one torch thread.

    Only the calling thread is pinned, so call it after the process group exists: gloo's own threads then stay
    free to run wherever there is room, which is their faster mode.
    """
    cores = available_cores()
    torch.set_num_threads(1)
    if len(cores) < world_size or not hasattr(os, "sched_setaffinity"):
        return Placement(tuple(cores), None, world_size, tuple(cores))
    chosen = tuple(cores[:world_size])
    os.sched_setaffinity(0, {chosen[rank]})
    return Placement(chosen, chosen[rank], world_size, tuple(cores))


def release(placement: Placement) -> None:
    """Let the calling thread use all its cores again: who is placed next must not take one core for the machine."""
    if placement.core is not None:
        os.sched_setaffinity(0, set(placement.allowed))


@contextmanager
def whole_machine(placement: Placement) -> Iterator[None]:
    """Inside, the calling rank uses the cores of all ranks, a torch thread each: the unsplit model's turn."""
    threads = torch.get_num_threads()
    if placement.core is not None:
        os.sched_setaffinity(0, set(placement.cores))
    torch.set_num_threads(len(placement.cores) if placement.core is None else placement.world_size)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if placement.core is not None:
            os.sched_setaffinity(0, {placement.core})
