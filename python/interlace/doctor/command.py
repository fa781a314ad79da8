"""`interlace doctor`: gathers the report, prints tables or JSON. Needs no process group and no GPU."""

from __future__ import annotations

import json
from typing import Any

import click

from .gpus import gpus
from .limits import cores, memory, system_calls
from .native import native
from .versions import build, versions

__all__ = ["doctor", "report"]


def report() -> dict[str, Any]:
    """Everything the doctor finds, as JSON types; `problems` lists what keeps the fast path away."""
    found: dict[str, Any] = {
        "versions": versions(),
        "build": build(),
        "cores": cores(),
        "memory": memory(),
        "system_calls": system_calls(),
        "gpus": gpus(),
        "native": native(),
    }
    found["problems"] = problems(found)
    return found


def problems(found: dict[str, Any]) -> list[str]:
    """One line for each finding a user should act on, with what to do."""
    lines = []
    if found["native"]["error"]:
        lines.append(
            f"the native part cannot be loaded: {found['native']['error']}; build it again with: "
            "pip install --force-reinstall --no-deps interlace (in the source tree: pip install .)"
        )
    if len(found["cores"]["affinity"]) < 2:
        lines.append("this process may run on one core only; two ranks would take turns on it")
    quota = found["cores"]["quota"]
    if quota is not None and quota < 2:
        lines.append(f"the control group grants {quota:g} cores; two ranks would take turns on them")
    for call, state in found["system_calls"].items():
        if state != "ok":
            lines.append(f"{call} does not work here ({state}); CPU groups fall back to torch.distributed")
    if found["gpus"]["devices"] and found["build"]["cuda"] != "built":
        lines.append(f"there are GPUs, but the CUDA half was not built: {found['build']['cuda']}")
    return lines


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def doctor(as_json: bool) -> None:
    """Show versions, what was built, cores, memory limits, GPUs, and which path each op takes and why."""
    found = report()
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    from .render import render

    render(found)
