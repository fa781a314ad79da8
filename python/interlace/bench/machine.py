"""What a number depends on: the machine, its state, the versions. All of it goes beside every table."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch

__all__ = ["describe", "flag_latency", "one_line"]

NEAR_SECONDS = (
    120e-9  # one-way flag between cores that share a last-level cache: 30-60 ns; across caches: 200 ns and up
)


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


def flag_latency() -> float | None:
    """One-way seconds of a flag between two ranks, measured at group set-up; None when not measured."""
    import interlace

    probe = getattr(interlace, "flag_latency", None)
    return None if probe is None else probe()


def describe(cores: int) -> dict[str, object]:
    """CPU, `cores` in use, memory, load, flag latency, versions and commit; JSON types only."""
    import interlace

    latency = flag_latency()
    return {
        "cpu": _cpu_model(),
        "cores": cores,
        "memory_gib": round(_memory_bytes() / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load_1min": _load(),
        "flag_latency_ns": None if latency is None else round(latency * 1e9, 1),
        "topology": None if latency is None else ("NEAR" if latency < NEAR_SECONDS else "FAR"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "interlace": getattr(interlace, "__version__", "unknown"),
        "commit": _commit(),
        "isa": torch.backends.cpu.get_cpu_capability(),
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
        parts.append(f"flag {machine['flag_latency_ns']} ns ({machine['topology']})")
    return ", ".join(parts)
