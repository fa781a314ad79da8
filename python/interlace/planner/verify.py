"""Predicted against measured: the run.json of `interlace train` beside what the planner says of the same run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from ._check import dtype_bytes
from .architecture import Architecture, read_architecture
from .cluster import read_cluster
from .hardware import Cluster
from .layout import Layout
from .memory import MemoryBreakdown, Precision, stage_memory
from .step import StepModel
from .workload import Training

__all__ = ["Comparison", "predicted_memory", "predicted_seconds", "verify"]

# Below this share of a rank's measured total a category is small: its error says nothing of the plan.
LARGE = 0.05


@dataclass(frozen=True)
class Comparison:
    """One category. unit: "bytes" (largest over the ranks of a stage) or "seconds" (per step, median).

    error: predicted / measured - 1. large: the category is at least 5 % of the rank's measured peak.
    """

    name: str
    stage: int
    predicted: float
    measured: float
    unit: str
    error: float
    large: bool
    note: str = ""


def verify(
    run: str | PathLike[str] | Mapping[str, Any], cluster: Cluster | str | PathLike[str] | None = None
) -> list[Comparison]:
    """Memory of each stage by category, and the time of a step where `cluster` describes the machine that ran.

    run: run.json or its content. cluster: a profile `interlace plan --measure` wrote on that machine, a preset or a
    file; without one, time is not compared. "activations" counts the logits and what the loss keeps, as they are
    measured. Raises ValueError in one line for a file that is no record of a run.
    """
    content = _read(run)
    arch = read_architecture(content["model"])
    found = []
    for stage in range(content["settings"]["pp"]):
        found += _memory(content, arch, stage)
    if cluster is not None:
        found.append(_time(content, arch, read_cluster(cluster)))
    return found


def predicted_memory(settings: Mapping[str, Any], arch: Architecture, stage: int) -> MemoryBreakdown:
    """What the planner says of one stage of a run: its dtype for all states, unfused modules (bytes)."""
    element = dtype_bytes("verify", settings["dtype"])
    return stage_memory(
        arch,
        stage=stage,
        pp=settings["pp"],
        tp=settings["tp"],
        dp=settings["dp"],
        zero=settings["zero"],
        seq=settings["seq"],
        microbatch=settings["microbatch"],
        microbatches=settings["microbatches"],
        interleave=settings["interleave"],
        schedule=settings["schedule"],
        recompute=settings["recompute"],
        sequence_parallel=settings["sequence_parallel"] and settings["tp"] > 1,
        precision=Precision(element, element, 2 * element, element),
        eager=True,
        gathered_logits=True,
        workspaces=False,  # shared memory, which is outside torch's allocator
    )


def predicted_seconds(settings: Mapping[str, Any], arch: Architecture, cluster: Cluster) -> Layout:
    """The run's layout, timed by the planner on `cluster`."""
    training = Training(
        global_batch=settings["global_batch"],
        seq=settings["seq"],
        dtype=settings["dtype"],
        sequence_parallel=settings["sequence_parallel"],
    )
    layout = Layout(
        dp=settings["dp"],
        tp=settings["tp"],
        pp=settings["pp"],
        cp=1,
        interleave=settings["interleave"],
        zero=settings["zero"],
        microbatch=settings["microbatch"],
        microbatches=settings["microbatches"],
        recompute=settings["recompute"],
        schedule=settings["schedule"],
        sequence_parallel=settings["sequence_parallel"],
    )
    if settings["world_size"] > cluster.devices_per_node and cluster.fabric is None:
        cluster = replace(cluster, devices_per_node=settings["world_size"])
    return StepModel(arch, cluster, training).timed(layout)


def _read(run: str | PathLike[str] | Mapping[str, Any]) -> Mapping[str, Any]:
    content, name = run, "run"
    if not isinstance(run, Mapping):
        name = str(run)
        try:
            content = json.loads(Path(run).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"verify: {name}: {error}") from None
    wanted = ("settings", "model", "memory", "step_seconds")
    if not isinstance(content, Mapping) or any(field not in content for field in wanted):
        raise ValueError(
            f"verify: {name} is no record of `interlace train`; expected fields {', '.join(wanted)}"
        )
    if content.get("format") != 1:
        raise ValueError(
            f"verify: {name}: format={content.get('format')!r}; expected 1, as this version writes"
        )
    return content


def _memory(content: Mapping[str, Any], arch: Architecture, stage: int) -> list[Comparison]:
    ranks = [rank for rank in content["memory"] if rank["stage"] == stage]
    measured = {name: max(rank.get(name, 0) for rank in ranks) for name in ranks[0]} if ranks else {}
    settings = content["settings"]
    said = predicted_memory(settings, arch, stage)
    rows = {
        "parameters": said.parameters,
        "gradients": said.gradients,
        "optimizer": said.optimizer,
        "activations": said.activations + said.logits,
        "peak": said.total,
    }
    notes = {}
    if settings["microbatches"] == 1:
        notes["peak"] = "one micro-batch: gradients and activations are never whole at the same time"
    known = [name for name in rows if name in measured]
    whole = measured.get("peak", sum(measured[name] for name in known))
    return [
        _row(name, stage, rows[name], measured[name], "bytes", whole, notes.get(name, "")) for name in known
    ]


def _time(content: Mapping[str, Any], arch: Architecture, cluster: Cluster) -> Comparison:
    seconds, measured = predicted_seconds(content["settings"], arch, cluster).seconds, content["step_seconds"]
    return _row("step", 0, seconds, measured, "seconds", measured, f"on cluster {cluster.name}")


def _row(
    name: str, stage: int, predicted: float, measured: float, unit: str, whole: float, note: str
) -> Comparison:
    error = predicted / measured - 1 if measured else (0.0 if not predicted else float("inf"))
    return Comparison(
        name, stage, float(predicted), float(measured), unit, error, measured >= LARGE * whole, note
    )
