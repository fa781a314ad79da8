"""Start one process per rank on this machine, and end them all together."""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence

from .mpi import arguments

__all__ = ["CTRL_C", "launch"]

GRACE_SECONDS = 3.0  # what a rank gets to close its sockets after SIGTERM before SIGKILL
# A thread that waits for its team spins so often (about 150 us) before it sleeps. That spans the gaps between
# the products of a model; the default, milliseconds, makes two threads on a busy machine ten times slower
# than one.
SPINS = "GOMP_SPINCOUNT=10000"
CTRL_C = 130  # what a shell reports for a command that SIGINT ended


def launch(target: str, settings: Mapping[str, object], ranks: int, *, mpiexec: str | None = None) -> int:
    """Run `target` on `ranks` new processes with a process group over loopback; return the exit status.

    target: "package.module:function" or "path/to/script.py:function", called as function(settings) on every
    rank. settings: what JSON can carry. mpiexec: a program that starts the ranks instead, so that they can call MPI.
    The status is 0, that of the first rank that failed, or 130 after Ctrl-C. When one rank fails the others are ended;
    when this process dies, even by SIGKILL, the kernel ends them (Linux).
    """
    if ranks < 1:
        raise ValueError(f"launch: ranks={ranks}; need at least 1")
    if mpiexec is not None:
        with tempfile.TemporaryDirectory(prefix="interlace-mpi-") as folder:
            place = {"store": f"{folder}/store", "world_size": ranks}
            return _wait([_spawn(arguments(mpiexec, ranks), target, place, settings)])
    # the store listens on a socket that is bound here and handed down: no other program can take the port in
    # between
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        children = [_start(target, settings, rank, ranks, server) for rank in range(ranks)]
    return _wait(children)


def _wait(children: list[subprocess.Popen[bytes]]) -> int:
    ended: queue.Queue[tuple[int, int]] = queue.Queue()
    for rank, child in enumerate(children):
        threading.Thread(target=lambda r=rank, c=child: ended.put((r, c.wait())), daemon=True).start()
    try:
        for _ in children:
            rank, status = ended.get()
            if status != 0:
                return _report(rank, status)
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return CTRL_C
    finally:
        _end(children)


def _start(
    target: str, settings: Mapping[str, object], rank: int, ranks: int, server: socket.socket
) -> subprocess.Popen[bytes]:
    place = {"rank": rank, "world_size": ranks, "port": server.getsockname()[1], "parent": os.getpid()}
    inherited: tuple[int, ...] = ()
    if rank == 0:
        place["listen_fd"] = server.fileno()
        inherited = (server.fileno(),)
    return _spawn([], target, place, settings, inherited)


def _spawn(
    before: Sequence[str],
    target: str,
    place: Mapping[str, object],
    settings: Mapping[str, object],
    inherited: tuple[int, ...] = (),
) -> subprocess.Popen[bytes]:
    rank = [
        sys.executable,
        "-m",
        "interlace.bench.rank",
        target,
        json.dumps(place),
        json.dumps(dict(settings)),
    ]
    # a session of its own: Ctrl-C reaches this process alone, which then ends the ranks in order
    command = ["env", SPINS, *before, *rank] if not before else [*before, "env", SPINS, *rank]
    return subprocess.Popen(command, pass_fds=inherited, start_new_session=True)


def _report(rank: int, status: int) -> int:
    if status < 0:
        print(f"rank {rank} was ended by signal {-status}; the other ranks are ended too", file=sys.stderr)
        return 128 - status
    return status


def _end(children: list[subprocess.Popen[bytes]]) -> None:
    alive = [child for child in children if child.poll() is None]
    for child in alive:
        child.terminate()
    for child in alive:
        try:
            child.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
