"""A rank dies or leaves: its peers raise within seconds, name it, and go on with groups that it was not
in."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist

import interlace
import interlace.functional as il
from tests.distributed import Killed, run_distributed, subgroup
from tests.faults.rig import Ending, attempt, check_health, restart

CALLS = {
    "all_reduce": lambda: il.all_reduce(torch.ones(8), group=None),
    "large all_reduce": lambda: il.all_reduce(torch.ones(1 << 20), group=None),
    "linear_all_reduce": lambda: il.linear_all_reduce(torch.ones(4, 8), torch.ones(8, 8), group=None),
    "linear_reduce_scatter": lambda: il.linear_reduce_scatter(
        torch.ones(300, 8), torch.ones(8, 8), group=None
    ),
    "all_gather_linear": lambda: il.all_gather_linear(torch.ones(300, 8), torch.ones(8, 8), group=None),
}


def pids_of(world_size: int) -> list[int]:
    pids: list[int] = [0] * world_size
    dist.all_gather_object(pids, os.getpid())
    return pids


def die_before_the_call(rank: int, world_size: int, victim: int, name: str) -> tuple[Ending, Ending, int]:
    restart()
    check_health()
    pid = pids_of(world_size)[victim]
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    first, second = attempt(CALLS[name]), attempt(CALLS[name])
    interlace.destroy()
    return first, second, pid


@pytest.mark.parametrize("name", CALLS)
def test_peers_of_a_killed_rank_raise_within_seconds_and_name_it(name: str) -> None:
    """Catches a wait that only looks at the deadline, here 20 s away."""
    results = run_distributed(3, die_before_the_call, 1, name, expect_death=[1])
    assert results[1] == Killed(signal.SIGKILL)
    for rank in (0, 2):
        first, second, pid = results[rank]
        assert first.error == "CollectiveAborted" and first.seconds < 5, first
        # whoever notices first ends the call for all, so the other survivor may be told by it
        assert "rank 1" in first.text and str(pid) in first.text and f"rank {rank} of 3" in first.text, first
        assert second.error == "CollectiveAborted" and second.seconds < 5 and "rank 1" in second.text, second


def die_in_the_middle(rank: int, world_size: int, victim: int, delay: float) -> tuple[Ending, int]:
    restart()
    pid = pids_of(world_size)[victim]
    if rank == victim:
        # the fault, not a way to synchronise: the moment of death is meant to be arbitrary
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    x = torch.ones(200, 64)
    weight = torch.ones(96, 64)

    def forever() -> None:
        while True:
            il.linear_all_reduce(x, weight, group=None)
            il.all_reduce(x, group=None)
            il.all_gather_linear(x, weight, group=None)

    ending = attempt(forever)
    interlace.destroy()
    return ending, pid


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("delay", [0.2, 0.2317, 0.2731])
def test_a_rank_killed_in_the_middle_of_calls_is_noticed(world_size: int, delay: float) -> None:
    """Catches a rank that dies between two signals of one call, where its peers wait for different things."""
    results = run_distributed(world_size, die_in_the_middle, 0, delay, expect_death=[0])
    for ending, pid in results[1:]:
        assert ending.error == "CollectiveAborted" and ending.seconds < 8, ending
        assert "rank 0" in ending.text and str(pid) in ending.text, ending


def survivors(rank: int, world_size: int) -> Ending:
    restart()
    pair = subgroup([0, 1])
    if rank < 2:
        interlace.init(pair, timeout=20.0)
    dist.barrier()
    if rank == 2:
        os._exit(3)
    ending = attempt(lambda: il.all_reduce(torch.ones(3), group=None))
    check_health(pair)
    interlace.destroy(pair)
    interlace.destroy()
    return ending


def test_survivors_keep_their_own_group() -> None:
    """Catches an abort that reaches beyond the group of the dead rank."""
    results = run_distributed(3, survivors, expect_death=[2])
    assert results[2] == Killed(-3)
    for ending in results[:2]:
        assert ending.error == "CollectiveAborted" and "rank 2" in ending.text, ending


def leave(rank: int, world_size: int) -> Ending:
    restart()
    dist.barrier()
    if rank == 0:
        interlace.destroy()
        ending = Ending("", "", 0.0)
    else:
        ending = attempt(lambda: il.all_reduce(torch.ones(3), group=None))
    restart()
    check_health()
    return ending


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_destroys_its_group_is_missed_at_once(world_size: int) -> None:
    """Catches peers that wait out the deadline for a rank that has left properly."""
    for ending in run_distributed(world_size, leave)[1:]:
        assert ending.error == "CollectiveAborted" and ending.seconds < 5, ending
        assert "rank 0" in ending.text, ending


def fork_and_call(rank: int, world_size: int) -> tuple[str, int]:
    restart()
    check_health()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        ending = attempt(lambda: il.all_reduce(torch.ones(3), group=None))
        os.write(write_end, f"{ending.error}: {ending.text}".encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    check_health()
    return text, status


def test_a_forked_child_is_refused_and_the_parent_goes_on() -> None:
    """Catches a child that writes into its parent's workspace, or waits for signals that its parent
    consumes."""
    for text, status in run_distributed(2, fork_and_call):
        assert status == 0 and "fork" in text and "spawn" in text, text


def first_use_in_child(rank: int, world_size: int) -> str:
    """The child of a fork drops the group: nothing it does at its exit may reach the peers."""
    restart()
    child = os.fork()
    if child == 0:
        interlace.destroy()
        os._exit(0)
    os.waitpid(child, 0)
    dist.barrier()
    check_health()
    return "healthy"


def test_a_forked_child_cannot_leave_the_group_of_its_parent() -> None:
    """Catches a destructor in the child that tells the peers their rank has left."""
    assert run_distributed(2, first_use_in_child) == ["healthy"] * 2
