"""Every subcommand, one after the other, on one start of the ranks."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

__all__ = ["SUITE", "cases", "run"]

# the sub-benchmarks and the options each has of its own, as its command would pass them
SUITE: dict[str, dict[str, Any]] = {
    "collective": {"bytes": None},
    "gemm": {"shapes": (), "tp": None, "phase": "both", "rows": None},
    "layer": {"shapes": (), "tp": None, "phase": "both", "rows": None},
    "model": {"model": ()},
    "moe": {"shapes": (), "tokens": None},
    "scaling": {"worlds": None, "planner": None},
    "attention": {"tokens": 4096, "heads": 8, "kv_heads": 8},
}


def chosen(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Those of the suite that run on the device asked for."""
    device = settings.get("device", "cpu")
    return {n: own for n, own in SUITE.items() if device in getattr(_module(n), "DEVICES", ("cpu", "cuda"))}


def cases(settings: Mapping[str, Any], world_size: int) -> list[Any]:
    """Those of all."""
    return [
        case
        for name, own in chosen(settings).items()
        for case in _module(name).cases({**own, **settings}, world_size)
    ]


def run(settings: Mapping[str, object]) -> int:
    """On every rank; the worst status of all, and the first that is neither right nor wrong ends it."""
    worst = 0
    for name, own in chosen(settings).items():
        status: int = _module(name).run({**own, **settings})
        if status > 1:
            return status
        worst = max(worst, status)
    return worst


def _module(name: str) -> Any:
    return importlib.import_module(f"interlace.bench.{name}")
