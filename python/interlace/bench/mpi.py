"""Ranks that MPI starts: it can be compared with where mpiexec began the processes, and nowhere else."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["arguments", "find_mpiexec"]

# the process dies with the one that started it, even by SIGKILL; exec keeps that
TETHERED = """
import ctypes, os, sys
if sys.platform.startswith("linux"):
    ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def find_mpiexec() -> tuple[str | None, str]:
    """The mpiexec to start ranks with, or None and why there is none.

    Intel MPI comes as wheels (impi-rt and mpi4py), Open MPI from a distribution (Debian: openmpi-bin).
    """
    if importlib.util.find_spec("mpi4py") is None:
        return None, "mpi4py is not installed"
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.is_file() else shutil.which("mpiexec")
    return found, "" if found else "mpi4py is installed, but no mpiexec is on PATH"


def arguments(mpiexec: str, ranks: int) -> list[str]:
    """The command up to the program: ranks are not pinned (that is done here, alike for all columns)."""
    said = subprocess.run([mpiexec, "--version"], capture_output=True, text=True).stdout
    if "Intel" in said:
        options = ["-genv", "I_MPI_PIN", "0"]
    elif "Open MPI" in said or "OpenRTE" in said:
        options = [
            "--bind-to",
            "none",
            "--oversubscribe",
            *(["--allow-run-as-root"] if os.geteuid() == 0 else []),
        ]
    else:
        options = []
    return [sys.executable, "-c", TETHERED, str(os.getpid()), mpiexec, *options, "-n", str(ranks)]
