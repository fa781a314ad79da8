"""Persistent worker processes for distributed tests, with a watchdog.

``run_distributed(world_size, fn, *args)`` calls the module-level ``fn(rank, world_size, *args)`` in every
worker of a gloo process group and returns the list of results. The workers of a world size are started
once and kept, because on two cores starting them costs more than most tests. Whatever goes wrong ends in
one ``DistributedFailure`` that shows the traceback of the rank that failed first and the stacks of the
ranks that were still running; the pool is then killed and the next call starts a new one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from tests.leaks import Snapshot
from tests.worker import Outcome, release, remember, subgroup

__all__ = ["DistributedFailure", "Killed", "Pool", "run_distributed", "session", "subgroup"]

_START_SECONDS = 120.0  # importing torch in several processes at once on a busy machine
_GRACE_SECONDS = 5.0  # once a rank has failed, what its peers get to report on their own
_DUMP_SECONDS = 3.0  # for the stack dump of a stuck process to reach its log
_LOG_TAIL_BYTES = 12000
_KEPT_WORLD_SIZES = (1, 2, 3, 4)

# What a worker starts with unless the caller of run_distributed says otherwise.
_WORKER_ENV = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no pool of compiler processes: they would count as leaked children
    "INTERLACE_TIMEOUT": "30",  # below the watchdog, so that a lost signal is reported by interlace itself
}


class DistributedFailure(AssertionError):
    """A rank raised, died or ran past the time limit; the message holds tracebacks and stacks of all
    ranks."""


@dataclasses.dataclass(frozen=True)
class Killed:
    """Result of a rank that was expected to die: ``signal`` is the number that ended it, 0 for a plain
    exit."""

    signal: int


class _Worker:
    """One process of a pool, seen from the test session: control connection and an unnamed log file."""

    def __init__(self, rank: int, world_size: int, env: dict[str, str]) -> None:
        self.rank = rank
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        self.connection, theirs = Pipe()
        config = {"fd": theirs.fileno(), "rank": rank, "world_size": world_size, "path": sys.path}
        boot = "import sys, json; c = json.loads(sys.argv[1]); sys.path[:] = c['path']\n"
        boot += "from tests.worker import main; main(c)"
        self.process = subprocess.Popen(
            [sys.executable, "-c", boot, json.dumps(config)],
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            pass_fds=[theirs.fileno()],
            env={**os.environ, **_WORKER_ENV, **env},
            start_new_session=True,  # Ctrl-C at the terminal reaches the session only, which then ends the workers
        )
        theirs.close()

    def log_size(self) -> int:
        return os.fstat(self.log.fileno()).st_size

    def log_tail(self, start: int = 0) -> str:
        start = max(start, self.log_size() - _LOG_TAIL_BYTES)
        return os.pread(self.log.fileno(), _LOG_TAIL_BYTES, start).decode(errors="replace")

    def stack_dump(self) -> str:
        """Stacks of all threads, written by faulthandler, which works while the process hangs in native
        code."""
        start = self.log_size()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + _DUMP_SECONDS
        size, quiet = start, threading.Event()
        while time.monotonic() < deadline:
            quiet.wait(0.1)
            if self.log_size() == size > start:
                break
            size = self.log_size()
        return self.log_tail(start) or "(no stack dump: the process does not react to SIGUSR1)"

    def close(self) -> None:
        self.connection.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.log.close()


class Pool:
    """The workers of one world size and environment, in one gloo process group over a TCP store on
    loopback."""

    def __init__(self, world_size: int, env: dict[str, str]) -> None:
        self.world_size = world_size
        self.env = env
        self.workers = [_Worker(rank, world_size, env) for rank in range(world_size)]
        try:
            port = pickle.loads(self._gather(_START_SECONDS, ranks=[0])[0].payload)
            for worker in self.workers[1:]:
                worker.connection.send_bytes(pickle.dumps(port))
            self._gather(_START_SECONDS)
            self.call(remember, (), _START_SECONDS, ())
        except BaseException:
            self.close()
            raise

    def call(
        self, fn: Callable[..., Any], args: Sequence[Any], timeout: float, deaths: Sequence[int]
    ) -> list[Any]:
        __tracebackhide__ = True
        request = pickle.dumps((fn.__module__, fn.__qualname__, tuple(args), sys.path))
        for worker in self.workers:
            worker.connection.send_bytes(request)
        outcomes = self._gather(timeout, name=f"{fn.__module__}.{fn.__qualname__}", deaths=deaths)
        results: list[Any] = []
        for worker in self.workers:
            outcome = outcomes.get(worker.rank)
            results.append(
                Killed(-worker.process.wait()) if outcome is None else pickle.loads(outcome.payload)
            )
        return results

    def close(self) -> None:
        for worker in self.workers:
            worker.close()

    def _gather(
        self,
        timeout: float,
        name: str = "start of the workers",
        ranks: Sequence[int] | None = None,
        deaths: Sequence[int] = (),
    ) -> dict[int, Outcome]:
        """One outcome per rank; a rank in ``deaths`` has to die instead. Raises DistributedFailure
        otherwise."""
        __tracebackhide__ = True
        waiting = {w.connection: w for w in self.workers if ranks is None or w.rank in ranks}
        outcomes: dict[int, Outcome] = {}
        problems: list[tuple[float, int, str]] = []
        started = time.monotonic()
        deadline = started + timeout
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                worker = waiting.pop(connection)
                problem = self._receive(worker, connection, outcomes, deaths)
                if problem is not None:
                    problems.append(problem)
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if not problems and not waiting:
            return outcomes
        raise DistributedFailure(
            self._report(name, time.monotonic() - started, problems, list(waiting.values()))
        )

    @staticmethod
    def _receive(
        worker: _Worker, connection: Connection, outcomes: dict[int, Outcome], deaths: Sequence[int]
    ) -> tuple[float, int, str] | None:
        try:
            outcome: Outcome = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            code = worker.process.wait()
            if worker.rank in deaths:
                return None
            how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            return (
                time.monotonic(),
                worker.rank,
                f"the process died ({how}); its last output:\n{worker.log_tail()}",
            )
        if worker.rank in deaths:
            return outcome.when, worker.rank, f"was expected to die, but answered\n{outcome.traceback}"
        outcomes[worker.rank] = outcome
        return None if outcome.ok else (outcome.when, worker.rank, outcome.traceback)

    def _report(
        self, name: str, seconds: float, problems: list[tuple[float, int, str]], stuck: list[_Worker]
    ) -> str:
        problems.sort()
        what = (
            f"rank {problems[0][1]} failed first"
            if problems
            else "no rank answered wrongly, but some never did"
        )
        parts = [f"{name} on {self.world_size} ranks, after {seconds:.1f} s: {what}"]
        parts += [f"--- rank {rank} ---\n{text}" for _, rank, text in problems]
        parts += [f"--- rank {w.rank} did not answer; stacks ---\n{w.stack_dump()}" for w in stuck]
        return "\n".join(parts)


class _Session:
    """Pools of this test session and the number of distributed calls that ran to their end."""

    def __init__(self) -> None:
        self.pools: dict[tuple[int, tuple[tuple[str, str], ...]], Pool] = {}
        self.calls = 0

    def pool(self, world_size: int, env: dict[str, str]) -> Pool:
        key = (world_size, tuple(sorted(env.items())))
        if key not in self.pools:
            self.pools[key] = Pool(world_size, env)
        return self.pools[key]

    def discard(self, pool: Pool) -> None:
        pool.close()
        self.pools = {key: kept for key, kept in self.pools.items() if kept is not pool}

    def snapshot(self) -> Snapshot:
        """What the test session has open, without what belongs to the pools."""
        workers = [worker for pool in self.pools.values() for worker in pool.workers]
        files = {fd for w in workers for fd in (w.connection.fileno(), w.log.fileno())}
        return Snapshot(files, {w.process.pid for w in workers})

    def leaks_since(self, before: Snapshot) -> list[str]:
        """At the end of a test module: what is left in the session, and in each worker once its groups
        are gone."""
        lines = [f"session: {line}" for line in before.new_in(self.snapshot())]
        for pool in list(self.pools.values()):
            try:
                left = pool.call(release, (), 60.0, ())
            except DistributedFailure:
                self.discard(pool)
                raise
            lines += [
                f"rank {rank} of {pool.world_size}: {line}"
                for rank, found in enumerate(left)
                for line in found
            ]
        return lines

    def close(self) -> None:
        for pool in list(self.pools.values()):
            self.discard(pool)


session = _Session()


def run_distributed(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    env: dict[str, str] | None = None,
    expect_death: Sequence[int] = (),
) -> list[Any]:
    """Calls the module-level ``fn(rank, world_size, *args)`` in every worker and returns the results in
    rank order.

    env: variables on top of the session's; such a pool, like one of more than four ranks, is not kept.
    expect_death: ranks that have to die in the call; their result is ``Killed`` and the pool is not kept.
    Fails with DistributedFailure when a rank raises, dies unasked, or the call takes longer than
    ``timeout`` seconds.
    """
    __tracebackhide__ = True
    if "." in fn.__qualname__:
        raise ValueError(
            f"run_distributed: {fn.__qualname__} is not at module level, workers cannot import it"
        )
    pool = session.pool(world_size, env or {})
    kept = world_size in _KEPT_WORLD_SIZES and not env and not expect_death
    try:
        results = pool.call(fn, args, timeout, expect_death)
    except BaseException:
        kept = False
        raise
    finally:
        if not kept:
            session.discard(pool)
    session.calls += 1
    return results
