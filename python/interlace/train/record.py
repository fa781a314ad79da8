"""run.json: what ran, where, and what it took."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from interlace.bench.machine import describe

from .settings import Settings

__all__ = ["FORMAT", "record", "write"]

FORMAT = 1


def record(
    settings: Settings,
    model: dict[str, Any],
    *,
    cores: int,
    losses: list[float],
    seconds: list[float],
    memory: list[dict[str, int]],
    stages: list[int],
) -> dict[str, Any]:
    """The content of run.json.

    model: the config. seconds: of each timed step, the slowest rank's. memory: bytes by category of each rank;
    stages: its pipeline stage. step_seconds is the median.
    """
    ordered = sorted(seconds)
    median = ordered[len(ordered) // 2] if len(ordered) % 2 else sum(ordered[len(ordered) // 2 - 1 :][:2]) / 2
    return {
        "format": FORMAT,
        "settings": settings.as_dict()
        | {"world_size": settings.world_size, "microbatches": settings.microbatches},
        "model": model,
        "machine": describe(cores),
        "losses": losses,
        "step_seconds": median,
        "step_seconds_all": seconds,
        "tokens_per_second": settings.global_batch * settings.seq / median,
        "memory": [{"stage": stage, **categories} for stage, categories in zip(stages, memory, strict=True)],
    }


def write(content: dict[str, Any], path: str) -> None:
    """Writes run.json."""
    Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
