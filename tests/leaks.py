"""What a test module may leave behind: nothing. File descriptors, child processes, /dev/shm, shared
mappings."""

from __future__ import annotations

import collections
import gc
import os
import pathlib
import time
from collections.abc import Collection

# Helpers of the Python runtime that live until the interpreter ends, whoever starts them first.
_LASTING_CHILDREN = ("multiprocessing.resource_tracker",)
SHM_GRACE_SECONDS = 5.0


def open_files(skip: Collection[int] = ()) -> collections.Counter[str]:
    """What the open descriptors of this process point to, with counts; numbers and inodes differ from run
    to run."""
    targets: collections.Counter[str] = collections.Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
        if int(name) not in skip:
            targets[target.split(":[")[0]] += 1
    return targets


def shared_mappings() -> collections.Counter[str]:
    """Mappings of memory that other processes can see.

    Semaphores of Python's multiprocessing are left out: they lose their name at birth, and torch.compile keeps one.
    """
    lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    names = [line.split(maxsplit=5)[5] for line in lines if "/memfd:" in line or "/dev/shm/" in line]
    return collections.Counter(name for name in names if "/dev/shm/sem." not in name)


def children(skip: Collection[int] = ()) -> set[int]:
    """Process ids of the children of this process, zombies included."""
    found: set[int] = set()
    for task in pathlib.Path("/proc/self/task").iterdir():
        try:
            found |= {int(pid) for pid in (task / "children").read_text().split()}
        except FileNotFoundError:
            continue  # the thread ended meanwhile
    return {pid for pid in found if pid not in skip and not _lasting(pid)}


def _lasting(pid: int) -> bool:
    try:
        command = pathlib.Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return any(name in command for name in _LASTING_CHILDREN)


class Snapshot:
    """What a process has open at one moment; ``skip_files`` and ``skip_children`` are accounted for
    elsewhere."""

    def __init__(self, skip_files: Collection[int] = (), skip_children: Collection[int] = ()) -> None:
        gc.collect()
        self.files = open_files(skip_files)
        self.children = children(skip_children)
        self.mappings = shared_mappings()
        self.shm = set(os.listdir("/dev/shm"))

    def new_in(self, later: Snapshot) -> list[str]:
        """One line per thing that ``later`` has and this one has not."""
        lines = [f"open file {name} x{count}" for name, count in (later.files - self.files).items()]
        lines += [f"child process {pid}" for pid in later.children - self.children]
        lines += [
            f"shared mapping {name} x{count}" for name, count in (later.mappings - self.mappings).items()
        ]
        return lines + [f"/dev/shm/{name}" for name in _lasting(later.shm - self.shm)]


def _lasting(names: set[str]) -> set[str]:
    """Those that are in /dev/shm for longer than a moment: other programs share the folder."""
    deadline = time.monotonic() + SHM_GRACE_SECONDS
    while names and time.monotonic() < deadline:
        time.sleep(0.1)
        names = names & set(os.listdir("/dev/shm"))
    return names
