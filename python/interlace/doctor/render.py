"""The doctor's report for a person."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

__all__ = ["render"]

BYTES = {"total", "available", "cgroup_limit", "dev_shm", "address_space_limit", "locked_memory_limit"}
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}


def render(found: dict[str, Any]) -> None:
    """Print one table a section, then the problems."""
    console = Console()
    for section in ("versions", "build", "cores", "memory", "system_calls"):
        console.print(_facts(section.replace("_", " "), found[section]), "")
    console.print(_gpu_table(found["gpus"]))
    native = found["native"]
    console.print(_facts("tile engine", native["engine"]), "")
    for op in dict.fromkeys(row["op"] for row in native["paths"]):
        console.print(_path_table(op, [row for row in native["paths"] if row["op"] == op]))
    for line in found["problems"]:
        console.print(f"[bold yellow]problem:[/] {escape(line)}")
    if not found["problems"]:
        console.print("no problems found")


def _facts(title: str, facts: dict[str, Any]) -> Table:
    table = Table("", "", show_header=False, box=None, pad_edge=False, **_title(title))
    for name, value in facts.items():
        table.add_row(name.replace("_", " ").ljust(22), escape(_plain(name, value)))
    if not facts:
        table.add_row("not known: the native part is not loaded")
    return table


def _plain(name: str, value: Any) -> str:
    if value is None:
        return "unlimited" if name.endswith(("limit", "quota")) else "-"
    if name in BYTES:
        return f"{value / 2**30:.2f} GiB"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    return str(value)


def _gpu_table(gpus: dict[str, Any]) -> Table:
    if not gpus["devices"]:
        return _facts("GPUs", {"none": gpus["reason"]})
    columns = ("device", "architecture", "memory", "SMs", "peers", "NVLS")
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, **_title("GPUs"))
    for index, device in enumerate(gpus["devices"]):
        peers = [str(b) for b, reachable in enumerate(gpus["peer_access"][index]) if reachable and b != index]
        table.add_row(
            f"{index}: {device['name']}",
            device["architecture"],
            f"{device['memory'] / 2**30:.0f} GiB",
            str(device["multiprocessors"]),
            ", ".join(peers) or "none",
            "yes" if gpus["multicast"][index] else "no",
        )
    return table


def _path_table(op: str, paths: list[dict[str, Any]]) -> Table:
    columns = ("dtype", "rows of x", "path", "why")
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, **_title(op))
    dtypes: dict[tuple[str, str, str], list[str]] = {}
    for row in paths:
        name = SHORT.get(row["dtype"], f"{row['device']}, {row['dtype']}")
        dtypes.setdefault((row["size"], row["algorithm"], row["reason"]), []).append(name)
    for (size, algorithm, reason), names in dtypes.items():
        table.add_row(" ".join(names), size, algorithm, escape(reason))
    return table


def _title(text: str) -> dict[str, Any]:
    return {"title": text, "title_justify": "left", "title_style": "bold"}
