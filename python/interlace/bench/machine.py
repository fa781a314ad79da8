"""What a number depends on: the machine, its state, the versions. All of it goes beside every table."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch

from interlace.bench.topology import NEAR_BYTES_PER_SECOND

__all__ = ["describe", "one_line", "versions"]


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith(("model name", "Model"))]
    return names[0] if names else platform.machine()


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0


def _commit() -> str | None:
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _load() -> float | None:
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def describe(cores: int, peer_read: float | None = None) -> dict[str, object]:
    """CPU, `cores` in use, memory, load, versions, commit; `peer_read` as measured. JSON types only."""
    import interlace

    near = None if peer_read is None else peer_read >= NEAR_BYTES_PER_SECOND
    return {
        "cpu": _cpu_model(),
        "cores": cores,
        "memory_gib": round(_memory_bytes() / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load_1min": _load(),
        "peer_read_gb_s": None if peer_read is None else round(peer_read / 1e9, 1),
        "topology": None if near is None else ("NEAR" if near else "FAR"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "interlace": interlace.__version__,
        "commit": _commit(),
        "isa": torch.backends.cpu.get_cpu_capability(),
    }


def versions() -> dict[str, str]:
    """Of what takes part in every number."""
    import interlace

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "interlace": interlace.__version__,
    }


def one_line(machine: dict[str, object]) -> str:
    """The same for a person: one line above the table."""
    parts = [
        str(machine["cpu"]),
        f"{machine['cores']} cores",
        f"torch {machine['torch']}",
        f"interlace {machine['interlace']}",
        f"load {machine['load_1min']}",
    ]
    if machine["topology"] is not None:
        parts.append(f"reads a peer's cache at {machine['peer_read_gb_s']} GB/s ({machine['topology']})")
    return ", ".join(parts)
