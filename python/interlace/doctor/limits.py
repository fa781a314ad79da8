"""What the kernel lets this process have: cores, memory, shared memory, descriptors."""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import torch

__all__ = ["cores", "memory", "system_calls"]

CGROUP = Path("/sys/fs/cgroup")


def cores() -> dict[str, object]:
    """Cores of the machine, of this process's affinity, of its control group's quota; torch's threads."""
    allowed = sorted(os.sched_getaffinity(0))
    return {
        "machine": os.cpu_count(),
        "affinity": allowed,
        "quota": cpu_quota(CGROUP, Path("/proc/self/cgroup")),
        "torch_threads": torch.get_num_threads(),
    }


def memory() -> dict[str, object]:
    """Sizes in bytes, None for unlimited. available is what the next allocation can count on."""
    total, free = _meminfo("MemTotal"), _meminfo("MemAvailable")
    limit, used = memory_limit(CGROUP, Path("/proc/self/cgroup"))
    left = [value for value in (free, None if limit is None else limit - (used or 0)) if value is not None]
    return {
        "total": total,
        "available": min(left) if left else None,
        "cgroup_limit": limit,
        "dev_shm": _filesystem_size("/dev/shm"),
        "address_space_limit": _rlimit(resource.RLIMIT_AS),
        "locked_memory_limit": _rlimit(resource.RLIMIT_MEMLOCK),
        "open_files_limit": _rlimit(resource.RLIMIT_NOFILE),
    }


def system_calls() -> dict[str, str]:
    """Calls the symmetric memory of CPU groups is made of: 'ok' or the error."""
    return {"memfd_create": _try_memfd(), "pidfd_open": _try_pidfd()}


def memory_limit(root: Path, membership: Path) -> tuple[int | None, int | None]:
    """(limit, used) in bytes of the tightest control group above this process; None: no limit."""
    tightest: tuple[int | None, int | None] = (None, None)
    for folder in _cgroup_folders(root, membership, "memory"):
        for limit_file, used_file in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = _number(folder / limit_file)
            # version 1 writes "no limit" as a number near 2**63
            if limit is not None and limit < 2**60 and (tightest[0] is None or limit < tightest[0]):
                tightest = (limit, _number(folder / used_file))
    return tightest


def cpu_quota(root: Path, membership: Path) -> float | None:
    """Cores the tightest control group grants, as a number of cores; None: no quota."""
    quotas = []
    for folder in _cgroup_folders(root, membership, "cpu"):
        fields = _text(folder / "cpu.max").split()
        if len(fields) == 2 and fields[0] != "max":
            quotas.append(int(fields[0]) / int(fields[1]))
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota and period and quota > 0:
            quotas.append(quota / period)
    return min(quotas, default=None)


def _cgroup_folders(root: Path, membership: Path, controller: str) -> Iterator[Path]:
    """This process's control group and those above it; in a container the visible root alone may be left."""
    for line in _text(membership).splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            base = root
        elif controller in controllers.split(","):
            base = root / controllers if (root / controllers).is_dir() else root / controller
        else:
            continue
        folder = base / path.lstrip("/")
        while folder != base:
            yield folder
            folder = folder.parent
        yield base


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.lstrip("-").isdigit() else None


def _meminfo(name: str) -> int | None:
    for line in _text(Path("/proc/meminfo")).splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return None


def _filesystem_size(path: str) -> int | None:
    try:
        facts = os.statvfs(path)
    except OSError:
        return None
    return facts.f_frsize * facts.f_blocks


def _rlimit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _try_memfd() -> str:
    try:
        descriptor = os.memfd_create("interlace-doctor")
        try:
            os.ftruncate(descriptor, mmap.PAGESIZE)
            with mmap.mmap(descriptor, mmap.PAGESIZE) as page:
                page[0] = 1
        finally:
            os.close(descriptor)
    except (OSError, AttributeError) as error:
        return str(error)
    return "ok"


def _try_pidfd() -> str:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        return str(error)
    return "ok"
