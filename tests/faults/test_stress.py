"""Many calls: tiny and fast, random with delays, counters near their wrap, threads, all ranks on one core."""

from __future__ import annotations

import os
import pathlib
import random
import threading
import time

import pytest
import torch
import torch.distributed as dist

import interlace.functional as il
from tests import oracle
from tests.distributed import run_distributed, subgroup
from tests.faults.rig import check_health, restart

WRAPS = (2**32 - 40, 2**31 - 40, 2**26 - 40, 2**24 - 40, 2**20 - 40, 2**16 - 40)


def tiny_sums(rank: int, world_size: int, calls: int) -> float:
    restart()
    x = torch.empty(1)
    base = world_size * (world_size - 1) // 2
    started = time.monotonic()
    for call in range(calls):
        value = call % 1000
        x.fill_(value + rank)
        total = il.all_reduce(x, group=None).item()
        if total != base + world_size * value:
            raise AssertionError(f"call {call}: {total} instead of {base + world_size * value}")
    return (time.monotonic() - started) / calls * 1e6


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_two_hundred_thousand_tiny_all_reduces(world_size: int) -> None:
    """Catches a flag that is used again too early (ABA), missing acquire or release, and waits that keep
    the core."""
    times = run_distributed(world_size, tiny_sums, 200_000, timeout=600)
    print(f"{world_size} ranks: {max(times):.1f} us per call")


def random_calls(rank: int, world_size: int, calls: int, slow_rank: int, group=None, seed: int = 0) -> int:
    """Ops and shapes from a seed that all ranks share; delays from one of their own, most of them on one
    rank."""
    shared, own = random.Random(seed), random.Random(1000 + rank)
    total = float(world_size * (world_size + 1) // 2)
    mine = rank + 1.0
    eye = torch.eye(8)
    delayed = 0
    for call in range(calls):
        if own.random() < (0.05 if rank == slow_rank else 0.003):
            delayed += 1
            time.sleep(
                own.choice((0.0, 1e-5, 1e-4, 1e-3))
            )  # the fault that is injected, not a way to synchronise
        rows = shared.choice((0, 1, 2, 3, 5, 17, 64, 65, 130, 300))
        x = torch.full((rows, 8), mine)
        op = shared.randrange(7)
        if op == 0:
            out, expected = il.all_reduce(x, group=group), x.new_full((rows, 8), total)
        elif op == 1:
            out, expected = il.linear_all_reduce(x, eye, group=group), x.new_full((rows, 8), total)
        elif op in (2, 3):
            size = oracle.chunk_sizes(rows, world_size)[rank]
            scatter = (
                il.reduce_scatter(x, group=group)
                if op == 2
                else il.linear_reduce_scatter(x, eye, group=group)
            )
            out, expected = scatter, x.new_full((size, 8), total)
        elif op in (4, 5):
            out = il.all_gather(x, group=group) if op == 4 else il.all_gather_linear(x, eye, group=group)
            expected = torch.arange(1.0, world_size + 1).repeat_interleave(rows)[:, None].expand(-1, 8)
        else:
            counts = [shared.randrange(4) for _ in range(world_size * world_size)]
            sends = counts[rank * world_size : (rank + 1) * world_size]
            receives = counts[rank::world_size]
            out = il.all_to_all(torch.full((sum(sends), 3), mine), receives, sends, group=group)
            expected = (
                torch.arange(1.0, world_size + 1)
                .repeat_interleave(torch.tensor(receives))[:, None]
                .expand(-1, 3)
            )
        oracle.check_equal(f"call {call}, op {op}, {rows} rows", out, expected)
    return delayed


def random_with_delays(rank: int, world_size: int, calls: int) -> int:
    restart()
    return random_calls(rank, world_size, calls, slow_rank=world_size - 1)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ten_thousand_random_calls_with_delays(world_size: int) -> None:
    """Catches staging that is overwritten while the slowest rank still reads it."""
    delays = run_distributed(world_size, random_with_delays, 10_000, timeout=400)
    assert min(delays) > 0 and delays[-1] > 300


def near_the_wrap(rank: int, world_size: int, first_epoch: int) -> None:
    restart(first_epoch=first_epoch)
    random_calls(rank, world_size, 150, slow_rank=0, seed=first_epoch)
    restart(first_epoch=first_epoch, workspace_bytes=4096)
    check_health()
    for rows in (10, 3000, 20):  # growth of the workspace on both sides of the wrap
        out = il.all_reduce(torch.full((rows, 64), 1.0), group=None)
        oracle.check_equal("all_reduce", out, torch.full((rows, 64), float(world_size)))
    random_calls(rank, world_size, 60, slow_rank=1)


@pytest.mark.parametrize("first_epoch", WRAPS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_counters_may_wrap(world_size: int, first_epoch: int) -> None:
    """Catches a plain comparison of epochs, and an epoch that loses its high bits when packed with a
    chunk."""
    run_distributed(world_size, near_the_wrap, first_epoch)


def on_one_core(rank: int, world_size: int, known: bool) -> float:
    core = {min(os.sched_getaffinity(0))}
    if known:
        os.sched_setaffinity(0, core)
        restart()
    else:
        restart()
        os.sched_setaffinity(0, core)  # the group was set up for more cores than it gets
    started = time.monotonic()
    random_calls(rank, world_size, 1500, slow_rank=0)
    return time.monotonic() - started


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("world_size", [2, 4])
def test_all_ranks_on_one_core(world_size: int, known: bool) -> None:
    """Catches a spin that keeps the only core from the rank it waits for: each call would cost a time
    slice."""
    run_distributed(world_size, on_one_core, known, timeout=60)


def two_threads(rank: int, world_size: int) -> None:
    """Each thread has its group; the threads of a rank run in any order."""
    groups = [subgroup(list(range(world_size))), dist.new_group(list(range(world_size)))]
    for group in groups:
        restart(group=group)
    failures: list[BaseException] = []

    def work(group: dist.ProcessGroup, seed: int) -> None:
        try:
            random_calls(rank, world_size, 1000, slow_rank=seed % world_size, group=group, seed=seed)
        except BaseException as error:  # reported below: an exception in a thread would be lost
            failures.append(error)

    threads = [threading.Thread(target=work, args=(group, seed)) for seed, group in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("world_size", [2, 3])
def test_two_threads_with_a_group_each(world_size: int) -> None:
    """Catches an op that holds the interpreter lock while it waits: two ranks then wait for each other's
    threads."""
    run_distributed(world_size, two_threads, timeout=90)


def slowest_first(rank: int, world_size: int) -> list[str]:
    """The first calls of a group, with one rank late on purpose: what algorithm ran?"""
    import interlace

    restart()
    seen = []
    for m in (1, 64, 65, 128, 1024):
        if rank == 0:
            time.sleep(
                0.05
            )  # the fault that is injected: a rank that measures or decides by time would differ
        il.linear_all_reduce(torch.ones(m, 64), torch.ones(48, 64), group=None)
        seen.append(interlace.last_path().algorithm)
    return seen


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_choose_the_same_algorithm_whoever_is_late(world_size: int) -> None:
    """Catches a choice made from local time."""
    results = run_distributed(world_size, slowest_first)
    assert all(result == results[0] for result in results), results


def memory_over_time(rank: int, world_size: int) -> tuple[int, int]:
    """Growth of this process in bytes over 3000 random calls, and of its open files, after a first 1500."""
    restart()

    def state() -> tuple[int, int]:
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))

    random_calls(rank, world_size, 1500, slow_rank=-1)
    before = state()
    random_calls(rank, world_size, 3000, slow_rank=-1)
    after = state()
    return after[0] - before[0], after[1] - before[1]


@pytest.mark.parametrize("world_size", [2, 3])
def test_calls_do_not_accumulate_memory_or_files(world_size: int) -> None:
    """Catches what leaks a little with every call: at 10 KB a call this grows by 30 MB."""
    for grown, files in run_distributed(world_size, memory_over_time):
        assert grown < 16 << 20 and files == 0
