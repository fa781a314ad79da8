"""The worker pool itself: what it returns, how it fails, that it recovers. Everything else in tests/
relies on it."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed import DistributedFailure, Killed, run_distributed, session, subgroup


def total(rank: int, world_size: int, value: torch.Tensor) -> torch.Tensor:
    value = value + rank
    dist.all_reduce(value)
    return value


def who(rank: int, world_size: int) -> tuple[int, int]:
    return os.getpid(), torch.get_num_threads()


def fail_on_last_rank(rank: int, world_size: int) -> None:
    if rank == world_size - 1:
        raise KeyError("the one that failed")
    dist.barrier()


def never_return_on_rank_0(rank: int, world_size: int) -> None:
    if rank == 0:
        threading.Event().wait()


def kill_own_process(rank: int, world_size: int, victim: int) -> int:
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def pair_sum(rank: int, world_size: int) -> float | None:
    group = subgroup([0, world_size - 1])
    value = torch.tensor(float(rank))
    if rank in (0, world_size - 1):
        dist.all_reduce(value, group=group)
    return value.item()


def open_a_file(rank: int, world_size: int) -> None:
    _kept.append(os.fdopen(os.open("/dev/null", os.O_RDONLY)))


def close_the_file(rank: int, world_size: int) -> None:
    _kept.pop().close()


_kept: list[object] = []


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_come_back_in_rank_order(world_size: int) -> None:
    """Catches a pool whose group, argument passing or order of results is wrong."""
    before = session.calls
    results = run_distributed(world_size, total, torch.ones(3))
    expected = world_size + world_size * (world_size - 1) // 2
    assert [r.tolist() for r in results] == [[expected] * 3] * world_size
    assert session.calls == before + 1


def test_workers_are_kept_and_use_one_thread() -> None:
    """Catches a pool that starts processes per call, or ranks that fight for the cores."""
    first, second = run_distributed(2, who), run_distributed(2, who)
    assert first == second
    assert [threads for _, threads in first] == [1, 1]
    assert len({pid for pid, _ in first} | {os.getpid()}) == 3


def test_the_rank_that_failed_first_is_shown_with_the_stacks_of_the_others() -> None:
    """Catches a watchdog that waits out the whole limit, or hides the cause behind the peers'
    consequences."""
    started = time.monotonic()
    with pytest.raises(DistributedFailure) as failure:
        run_distributed(3, fail_on_last_rank)
    assert time.monotonic() - started < 30
    text = str(failure.value)
    assert "rank 2 failed first" in text and "KeyError: 'the one that failed'" in text
    assert "rank 0 did not answer" in text and "barrier" in text
    assert len(run_distributed(3, who)) == 3  # a new pool


def test_the_time_limit_ends_a_stuck_rank_and_shows_where_it_was() -> None:
    """Catches a distributed test that can hang the suite."""
    with pytest.raises(DistributedFailure, match="rank 0 did not answer") as failure:
        run_distributed(2, never_return_on_rank_0, timeout=2.0)
    assert "never_return_on_rank_0" in str(failure.value)


def test_a_death_is_a_failure_unless_expected() -> None:
    """Catches a crash in native code that would pass for a result, or would block the next test."""
    with pytest.raises(DistributedFailure, match="rank 1 failed first") as failure:
        run_distributed(2, kill_own_process, 1)
    assert "SIGKILL" in str(failure.value)
    assert run_distributed(2, kill_own_process, 1, expect_death=[1]) == [0, Killed(signal.SIGKILL)]
    with pytest.raises(DistributedFailure, match="was expected to die"):
        run_distributed(2, kill_own_process, 1, expect_death=[0, 1])


def test_a_subgroup_excludes_the_others() -> None:
    """Catches a subgroup helper that hands the default group to everybody."""
    assert run_distributed(3, pair_sum) == [2.0, 1.0, 2.0]


def test_a_function_that_workers_cannot_import_is_refused() -> None:
    """Catches a closure that would fail in the workers with a message about pickle."""

    def local(rank: int, world_size: int) -> None:
        raise AssertionError("never called")

    with pytest.raises(ValueError, match="module level"):
        run_distributed(2, local)


def test_leaks_are_seen_in_the_session_and_in_the_workers() -> None:
    """Catches a leak check that can never find anything."""
    run_distributed(2, who)
    before = session.snapshot()
    assert session.leaks_since(before) == []
    with open("/dev/zero"):
        assert session.leaks_since(before) == ["session: open file /dev/zero x1"]
    run_distributed(2, open_a_file)
    assert [line.split(": ")[0] for line in session.leaks_since(before)] == ["rank 0 of 2", "rank 1 of 2"]
    run_distributed(2, close_the_file)
    assert session.leaks_since(before) == []
