"""One rank of a self-started run: `python -m interlace.bench.rank TARGET PLACE SETTINGS`."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import runpy
import signal
import sys
from collections.abc import Callable, Mapping
from typing import TypeAlias, cast

from interlace.bench.group import join, leave

__all__ = ["main"]

Target: TypeAlias = Callable[[Mapping[str, object]], "int | None"]

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(arguments: list[str]) -> int:
    """Join the process group, call the target with the settings, leave; the exit status is the target's."""
    target, place, settings = arguments
    where = json.loads(place)
    # MPI's ranks are children of mpiexec, which dies with the one that started it
    _die_with(where.get("parent", os.getppid()))
    function = _resolve(target)
    join(where)
    try:
        return int(function(json.loads(settings)) or 0)
    finally:
        leave()


def _resolve(target: str) -> Target:
    module, _, name = target.rpartition(":")
    if module.endswith(".py"):
        sys.path.insert(0, os.path.dirname(os.path.abspath(module)))  # as Python itself does for a script
        function = runpy.run_path(module)[name]
    else:
        function = getattr(importlib.import_module(module), name)
    return cast("Target", function)


def _die_with(parent: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # a thread of gloo may outlive destroy_process_group for a moment; static destructors would abort the
    # process
    os._exit(status)
