"""Every subcommand, one after the other, on one start of the ranks."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

__all__ = ["SUITE", "cases", "run"]

# the sub-benchmarks and the options each has of its own, as its command would pass them
SUITE: dict[str, dict[str, Any]] = {
    "collective": {"bytes": None},
    "gemm": {"shapes": (), "tp": None, "phase": "both", "rows": None},
    "layer": {"shapes": (), "rows": None},
    "model": {"model": ()},
    "moe": {"shapes": (), "tokens": None},
    "scaling": {"worlds": None, "planner": None},
    "attention": {"tokens": None, "heads": 8, "kv_heads": 8},
}


def chosen(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Those of the suite that run on the device asked for."""
    device = settings.get("device", "cpu")
    return {n: own for n, own in SUITE.items() if device in getattr(_module(n), "DEVICES", ("cpu", "cuda"))}


def cases(settings: Mapping[str, Any], world_size: int) -> list[Any]:
    """Those of all; a subcommand that cannot run on so many ranks has none. ValueError when that is every one."""
    parts, reasons = _parts(settings, world_size)
    if not parts:
        raise ValueError(f"bench all: nothing to measure: {'; '.join(reasons)}")
    return [case for part in parts.values() for case in part]


def run(settings: Mapping[str, object]) -> int:
    """On every rank; the worst status of all, and the first that is neither right nor wrong ends it."""
    worst = 0
    parts, reasons = _parts(settings, dist.get_world_size())
    if dist.get_rank() == 0:
        for reason in reasons:
            print(f"left out: {reason}", file=sys.stderr, flush=True)
    for name in parts:
        status: int = _module(name).run({**SUITE[name], **settings})
        if status > 1:
            return status
        worst = max(worst, status)
    return worst


def _parts(settings: Mapping[str, Any], world_size: int) -> tuple[dict[str, list[Any]], list[str]]:
    """Cases by subcommand, and why some have none."""
    parts: dict[str, list[Any]] = {}
    reasons = []
    for name, own in chosen(settings).items():
        try:
            parts[name] = _module(name).cases({**own, **settings}, world_size)
        except ValueError as error:
            reasons.append(f"{name}: {error}")
    return parts, reasons


def _module(name: str) -> Any:
    return importlib.import_module(f"interlace.bench.{name}")
