"""Limits of a host: shared memory, memory, number of ranks, several jobs at once, no group at all."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import warnings

import pytest
import torch
import torch.distributed as dist

import interlace
import interlace.functional as il
from tests import oracle
from tests.distributed import Pool, run_distributed
from tests.faults.rig import Ending, attempt, check_health, restart
from tests.faults.test_stress import random_calls


def no_shm(rank: int, world_size: int) -> tuple[int, list[str]]:
    before = os.statvfs("/dev/shm").f_bfree
    names = set(os.listdir("/dev/shm"))
    restart(workspace_bytes=256 << 20)
    out = il.all_reduce(torch.ones(8 << 20), group=None)
    oracle.check_equal("all_reduce", out, torch.full((8 << 20,), float(world_size)))
    used = (before - os.statvfs("/dev/shm").f_bfree) * os.statvfs("/dev/shm").f_frsize
    restart()
    return used, sorted(set(os.listdir("/dev/shm")) - names)


def test_a_large_workspace_needs_nothing_in_dev_shm() -> None:
    """Catches a workspace in /dev/shm: containers have 64 MB there, and running out of it is SIGBUS with
    no message."""
    for used, names in run_distributed(2, no_shm):
        assert used < 16 << 20 and names == []


def too_large(rank: int, world_size: int, size: int) -> tuple[Ending, Ending]:
    dist.barrier()
    interlace.destroy()
    dist.barrier()
    ending = attempt(lambda: interlace.init(workspace_bytes=size if rank == 1 else 1 << 20))
    dist.barrier()
    interlace.destroy()
    everywhere = attempt(lambda: interlace.init(workspace_bytes=size))
    dist.barrier()
    interlace.destroy()
    dist.barrier()
    check_health()
    return ending, everywhere


@pytest.mark.parametrize("size", [1 << 44, 1 << 60])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_workspace_beyond_the_memory_is_refused_on_every_rank(world_size: int, size: int) -> None:
    """Catches a rank that fails alone while its peers wait for its descriptor, and death by the memory
    killer."""
    for one, everywhere in run_distributed(world_size, too_large, size):
        for ending in (one, everywhere):
            assert ending.error in ("ValueError", "RuntimeError", "MemoryError", "CollectiveAborted"), ending
            assert "workspace" in ending.text and ending.seconds < 20, ending


def one_rank_cannot_map(rank: int, world_size: int) -> Ending:
    """A file size limit on one rank makes its segment fail; the peers have theirs."""
    dist.barrier()
    interlace.destroy()
    dist.barrier()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    ending = attempt(lambda: interlace.init(workspace_bytes=1 << 20))
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    dist.barrier()
    interlace.destroy()
    dist.barrier()
    check_health()
    return ending


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_failure_of_set_up_on_one_rank_is_told_to_all(world_size: int) -> None:
    """Catches a rendezvous that leaves the healthy ranks in a receive without end."""
    for ending in run_distributed(world_size, one_rank_cannot_map):
        assert ending.error in ("ValueError", "RuntimeError", "OSError", "CollectiveAborted"), ending
        assert "interlace" in ending.text and ending.seconds < 20, ending


def in_pieces(rank: int, world_size: int) -> None:
    x = torch.arange(300_000, dtype=torch.float32).remainder(7).view(3000, 100) + rank
    total = world_size * x - world_size * rank + world_size * (world_size - 1) // 2
    oracle.check_equal("all_reduce", il.all_reduce(x, group=None), total)
    own = oracle.chunk(total, 0, rank, world_size)
    oracle.check_equal("reduce_scatter", il.reduce_scatter(x, group=None), own)
    eye = torch.eye(100)
    oracle.check_equal("linear_all_reduce", il.linear_all_reduce(x, eye, group=None), total)
    oracle.check_equal("linear_reduce_scatter", il.linear_reduce_scatter(x, eye, group=None), own)
    whole = torch.cat([x - rank + r for r in range(world_size)])
    oracle.check_equal("all_gather_linear", il.all_gather_linear(x, eye, group=None), whole)
    oracle.check_equal("all_gather", il.all_gather(x, group=None), whole)
    random_calls(rank, world_size, 200, slow_rank=0)


@pytest.mark.parametrize("world_size", [2, 3])
def test_calls_beyond_the_largest_workspace_still_give_the_right_answer(world_size: int) -> None:
    """Catches a limit in the wrong unit, and pieces that overlap or leave a gap."""
    env = {"INTERLACE_WORKSPACE": "8192", "INTERLACE_MAX_WORKSPACE": "65536"}
    run_distributed(world_size, in_pieces, env=env)


def nine(rank: int, world_size: int) -> tuple[bool, str, str, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_health()
        check_health()
    path = interlace.last_path()
    told = [str(w.message) for w in caught if "interlace" in str(w.message)]
    return path.fused, path.reason, interlace.resolve(None).fallback, told


@pytest.mark.slow
def test_nine_ranks_on_a_host_fall_back_and_say_so() -> None:
    """Catches a table of eight entries that the ninth rank overruns, and users who are slower without
    being told."""
    results = run_distributed(9, nine, timeout=120)
    for fused, reason, fallback, _ in results:
        assert not fused and "8" in fallback and reason
    told = [text for result in results for text in result[3]]
    assert len(told) == 1 and "9 ranks" in told[0], told  # once for the group, not once a rank


def refused_groups(rank: int, world_size: int) -> list[Ending]:
    member = dist.new_group([0])
    calls = [
        lambda: il.all_reduce(torch.ones(2), group=member),
        lambda: il.all_reduce(torch.ones(2), group="no such group"),
        lambda: il.all_reduce(torch.ones(2), group=7),
        lambda: interlace.init(timeout=-1.0),
    ]
    interlace.destroy()
    endings = [attempt(call) for call in calls]
    check_health()
    return endings


def test_groups_that_are_none_of_the_callers_are_refused() -> None:
    """Catches an AttributeError from inside torch where the user needs to hear which group is wrong."""
    endings = run_distributed(2, refused_groups)
    assert endings[0][0].error == ""
    assert endings[1][0].error == "ValueError" and "not in the group" in endings[1][0].text
    for _, unknown, number, negative in endings:
        assert unknown.error == "ValueError" and "no such group" in unknown.text
        assert number.error == "TypeError" and "int" in number.text
        assert negative.error == "ValueError" and "timeout" in negative.text


def test_without_a_process_group_the_error_says_what_to_call() -> None:
    """Catches an internal error of torch for the most common mistake of a newcomer. Own process: no
    group, ever."""
    code = "import torch, interlace.functional as il; il.all_reduce(torch.ones(2), group=None)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith("ValueError") and "init_process_group" in last, (
        done.stderr
    )


def job(rank: int, world_size: int, number: int) -> int:
    restart()
    random_calls(rank, world_size, 800, slow_rank=number, seed=number)
    return number


def test_two_jobs_at_once_on_one_host() -> None:
    """Catches names made from MASTER_PORT or the rank: two jobs would meet in one segment."""
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    pools = [Pool(2, {**env, "JOB": str(number)}) for number in range(2)]
    results: list[list[int]] = [[], []]

    def drive(number: int) -> None:
        results[number] = pools[number].call(job, (number,), 90.0, ())

    threads = [threading.Thread(target=drive, args=(number,)) for number in range(2)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for pool in pools:
            pool.close()
    assert results == [[0, 0], [1, 1]]
