"""Signals while a rank waits: handlers run at once, an exception from a handler ends the call for
everybody."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

import interlace.functional as il
from tests import oracle
from tests.distributed import run_distributed
from tests.faults.rig import Ending, attempt, check_health, restart

CALLS = {
    "all_reduce": lambda: il.all_reduce(torch.ones(5), group=None),
    "all_gather_linear": lambda: il.all_gather_linear(torch.ones(3, 8), torch.ones(4, 8), group=None),
    "linear_reduce_scatter": lambda: il.linear_reduce_scatter(
        torch.ones(300, 8), torch.ones(4, 8), group=None
    ),
}


class Stop(Exception):
    """What the handler of a program raises."""


def raise_stop(number: int, frame: object) -> None:
    raise Stop(f"signal {number}")


def send_later(rank: int, number: int) -> None:
    """Sends to rank 0 while it waits: half a second after it said that it is about to call."""
    pids = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    dist.barrier()
    if rank == 1:
        # not to synchronise: rank 0 stays in the call until this rank joins, however long this takes
        threading.Event().wait(0.5)
        os.kill(pids[0], number)


def interrupted(rank: int, world_size: int, number: int, name: str) -> tuple[Ending, float]:
    restart(timeout=20.0)
    check_health()
    if rank == 0 and number == signal.SIGTERM:
        before = signal.signal(signal.SIGTERM, raise_stop)
    elif rank == 0:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
    send_later(rank, number)
    ending = attempt(CALLS[name]) if rank == 0 else None
    dist.barrier()
    if rank != 0:
        ending = attempt(CALLS[name])
    else:
        signal.signal(number, before)
    dist.barrier()
    check_health()
    return ending, time.monotonic()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, "Stop")]
)
def test_an_exception_of_a_signal_handler_ends_the_wait(number: int, error: str, name: str) -> None:
    """Catches a rank that ignores Ctrl-C, swallows the handler's exception, or leaves its peers waiting."""
    results = run_distributed(2, interrupted, number, name)
    assert results[0][0].error == error and results[0][0].seconds < 3, results
    assert results[1][0].error == "CollectiveAborted" and "rank 0" in results[1][0].text, results
    assert results[1][0].seconds < 2, results


def handled(rank: int, world_size: int) -> list[float]:
    """The handler returns: the call goes on and gives its result; the handler ran during the wait, not
    after it."""
    restart(timeout=20.0)
    times: list[float] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: times.append(time.monotonic()))
    send_later(rank, signal.SIGTERM)
    if rank == 1:
        threading.Event().wait(
            0.5
        )  # rank 0 waits on, so a handler that runs only after the call is seen to be late
    if rank == 1:
        times.append(time.monotonic())
    out = il.all_reduce(torch.ones(5), group=None)
    oracle.check_equal("all_reduce", out, torch.full((5,), 2.0))
    signal.signal(signal.SIGTERM, before)
    check_health()
    return times


def test_a_handler_that_returns_does_not_disturb_the_call() -> None:
    """Catches a wait that fails with EINTR, or handlers that are put off until the peer comes."""
    (handler_ran,), (peer_came,) = run_distributed(2, handled)
    assert handler_ran < peer_came


def in_backward(rank: int, world_size: int) -> Ending:
    """autograd runs CPU backward on the thread that called it, so Ctrl-C must reach a wait inside it too."""
    restart(timeout=20.0)
    if rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    x = torch.ones(4, 8, requires_grad=True)
    loss = il.copy_to_region(x, group=None).sum()
    send_later(rank, signal.SIGINT)
    ending = attempt(loss.backward) if rank == 0 else None
    dist.barrier()
    if rank == 1:
        ending = attempt(loss.backward)
    dist.barrier()
    check_health()
    return ending


def test_ctrl_c_during_backward() -> None:
    """Catches an interrupt that autograd turns into an internal error, or that is lost."""
    first, second = run_distributed(2, in_backward)
    assert first.error == "KeyboardInterrupt" and first.seconds < 3, first
    assert second.error == "CollectiveAborted" and "rank 0" in second.text, second
