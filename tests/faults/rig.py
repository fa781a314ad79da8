"""What the fault tests share: a fresh group with a short limit, a call that reports how it ended, a
health check."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import interlace
import interlace.functional as il
from tests import oracle


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a call ended: the name of the exception class ('' when it returned), its text, and the seconds
    it took."""

    error: str
    text: str
    seconds: float


def restart(timeout: float = 20.0, group: Any = None, **options: Any) -> None:
    """The group anew, so that no test starts in the state that another one left. Collective over the
    group."""
    dist.barrier(group)
    interlace.destroy(group)
    dist.barrier(group)
    interlace.init(group, timeout=timeout, **options)


def attempt(call: Callable[[], Any]) -> Ending:
    started = time.monotonic()
    try:
        call()
    except BaseException as error:  # KeyboardInterrupt included
        return Ending(type(error).__name__, str(error), time.monotonic() - started)
    return Ending("", "", time.monotonic() - started)


def check_health(group: Any = None) -> None:
    """Every op of the group gives the right answer, several times over."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    for turn in range(4):
        x = torch.full((5 + turn, 4), rank + turn + 1.0)
        total = float(sum(r + turn + 1 for r in range(world_size)))
        oracle.check_equal("all_reduce", il.all_reduce(x, group=group), torch.full(x.shape, total))
        out = il.linear_all_reduce(x, torch.eye(4), group=group)
        oracle.check_equal("linear_all_reduce", out, torch.full(x.shape, total))
        rows = oracle.chunk_sizes(5 + turn, world_size)[rank]
        out = il.linear_reduce_scatter(x, torch.eye(4), group=group)
        oracle.check_equal("linear_reduce_scatter", out, torch.full((rows, 4), total))
        out = il.all_gather_linear(x, torch.eye(4), group=group)
        expected = torch.arange(1.0, world_size + 1).repeat_interleave(5 + turn)[:, None].expand(-1, 4) + turn
        oracle.check_equal("all_gather_linear", out, expected)
