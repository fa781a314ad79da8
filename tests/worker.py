"""The worker's side of a distributed test: joins the group, runs what the session sends, answers.

A worker never outlives its session: it is killed with it, and ends when the control connection closes.
"""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import functools
import gc
import importlib
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from tests.leaks import Snapshot

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_JOIN_SECONDS = 120.0  # peers may still be importing torch


@dataclasses.dataclass
class Outcome:
    """What one rank answered: its result, or the traceback and the time (CLOCK_MONOTONIC, shared by
    processes)."""

    ok: bool
    payload: bytes
    traceback: str
    when: float


_subgroups: dict[tuple[int, ...], Any] = {}
_first: list[Snapshot] = []


def subgroup(ranks: Sequence[int]) -> Any:
    """The process group of ``ranks``, made once per module; every rank of the pool calls it, members or
    not."""
    import torch.distributed as dist

    key = tuple(ranks)
    if key not in _subgroups:
        _subgroups[key] = dist.new_group(list(ranks))
    return _subgroups[key]


def remember(rank: int, world_size: int) -> None:
    """Right after joining the group: what is open from now on and not given back by a test module is a
    leak."""
    _first.append(Snapshot())


def release(rank: int, world_size: int) -> list[str]:
    """At the end of a test module: gives back what it left to the groups, and lists what remains."""
    import torch.distributed as dist

    _destroy_groups()
    dist.barrier()
    return _first[0].new_in(Snapshot())


def _destroy_groups() -> None:
    """The state of interlace first, then every group but the default one, in the order in which they were
    made."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    interlace = sys.modules.get("interlace")
    _subgroups.clear()
    for group in list(distributed_c10d._world.pg_map):
        if interlace is not None:
            interlace.destroy(group)
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    _forget_meshes()


def _forget_meshes() -> None:
    """DTensor keeps what it worked out in caches, and with it every mesh it saw and the groups of that mesh."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    clear_redistribute_planner_cache()
    _clear_sharding_prop_cache()
    for cached in [obj for obj in gc.get_objects() if type(obj) is functools._lru_cache_wrapper]:
        if str(cached.__module__).startswith("torch.distributed."):
            cached.cache_clear()


def main(config: dict[str, Any]) -> None:
    ctypes.CDLL(None).prctl(
        _PR_SET_PDEATHSIG, signal.SIGKILL
    )  # the session may be killed: leave nothing behind
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    connection = Connection(config["fd"])
    rank, world_size = config["rank"], config["world_size"]
    try:
        _join_group(connection, rank, world_size)
        _answer(connection, lambda: None)
        cores = os.sched_getaffinity(0)
        while True:
            request = pickle.loads(connection.recv_bytes())
            os.sched_setaffinity(0, cores)
            _answer(connection, functools.partial(_perform, request, rank, world_size))
    except (EOFError, ConnectionResetError, BrokenPipeError):
        os._exit(
            0
        )  # the session ended; peers end at the same time, so there is nobody left to say goodbye to


def _join_group(connection: Connection, rank: int, world_size: int) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    limit = timedelta(seconds=_JOIN_SECONDS)
    if rank == 0:
        store = dist.TCPStore(
            "127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False, timeout=limit
        )
        _answer(connection, lambda: store.port)
    else:
        port = pickle.loads(connection.recv_bytes())
        store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    dist.barrier()


def _perform(request: tuple[str, str, tuple[Any, ...], list[str]], rank: int, world_size: int) -> Any:
    import torch

    module, name, args, path = request
    sys.path[:] = path
    fn = getattr(importlib.import_module(module), name)
    torch.manual_seed(1000 + rank)  # different data on every rank: equal data hides most sharding bugs
    return fn(rank, world_size, *args)


def _answer(connection: Connection, produce: Callable[[], Any]) -> None:
    try:
        outcome = Outcome(True, pickle.dumps(produce()), "", 0.0)
    except BaseException:  # KeyboardInterrupt and SystemExit included: the session must learn of everything
        outcome = Outcome(False, b"", traceback.format_exc(), 0.0)
    outcome.when = time.monotonic()
    connection.send_bytes(pickle.dumps(outcome))
