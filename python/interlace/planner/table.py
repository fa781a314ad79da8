"""The answer as aligned tables for a terminal."""

from __future__ import annotations

from dataclasses import fields

from rich.console import Console
from rich.table import Table

from .architecture import Architecture
from .cluster import Cluster
from .layout import Layout
from .memory import MemoryBreakdown
from .model import count_parameters
from .ranking import causes
from .verify import Comparison
from .words import count, duration, gigabytes, rate
from .workload import Serving, Training

__all__ = ["CATEGORIES", "headline", "print_layouts", "verification"]

CATEGORIES = tuple(item.name for item in fields(MemoryBreakdown))


def headline(
    arch: Architecture, cluster: Cluster, workload: Training | Serving, gpus: int, name: str, limit: float
) -> str:
    """One paragraph: the model, the machines, the work and the memory limit."""
    total, active = count_parameters(arch)
    model = f"{name}: {arch.family}, {count(total)} parameters"
    if active != total:
        model += f" ({count(active)} active)"
    machine = (
        f"{gpus} x {cluster.device.name} in nodes of {cluster.devices_per_node}, {cluster.node.name} inside"
    )
    if cluster.fabric is not None and gpus > cluster.devices_per_node:
        machine += f", {cluster.fabric.name} between"
    if isinstance(workload, Training):
        work = f"{workload.global_batch} sequences of {workload.seq} tokens per step, "
        work += f"{workload.dtype}, {workload.optimizer}"
    else:
        work = (
            f"{workload.concurrency} requests of {workload.prompt} + {workload.output} tokens, "
            f"weights {workload.dtype}, cache {workload.kv_dtype}"
        )
    return (
        f"{model}\n{machine}\n{work}\nlimit {gigabytes(limit)} per GPU of {gigabytes(cluster.device.memory)}"
    )


def print_layouts(layouts: list[Layout], shown: int, console: Console) -> None:
    """The ranked table, then memory by stage, time, collectives and placement of the first layout."""
    best = layouts[0]
    console.print(_ranking(layouts[:shown]))
    if len(layouts) > shown:
        console.print(f"{len(layouts) - shown} more layouts fit (--top)")
    losses = [(number, layout) for number, layout in enumerate(layouts[:shown], 1) if layout.lost]
    if losses:
        console.print("\n[bold]Why the others lost[/bold]")
        for number, layout in losses:
            console.print(f"  {number}  {layout.name}  {layout.lost}", highlight=False)
    console.print(f"\n[bold]The best: {best.name}[/bold]")
    console.print(_memory(best))
    console.print(
        f"margin to the limit: {gigabytes(best.margin)} on stage {best.fullest_stage} (the fullest)",
        highlight=False,
    )
    if best.step is not None:
        console.print(_time(best))
        if best.step.collectives:
            console.print(_collectives(best))
    for note in best.notes:
        console.print(f"note: {note}", highlight=False)
    console.print(_placement(best), highlight=False)


def verification(rows: list[Comparison]) -> Table:
    """Predicted against measured by stage and category; a star marks categories too small to say anything."""
    columns = [
        ("stage", "r"),
        ("what", "l"),
        ("predicted", "r"),
        ("measured", "r"),
        ("error", "r"),
        ("", "l"),
    ]
    table = _table("predicted against measured", columns)
    for row in rows:
        words = gigabytes if row.unit == "bytes" else duration
        small = "" if row.large or row.unit != "bytes" else "*"
        error = f"{row.error:+.1%}{small}"
        table.add_row(str(row.stage), row.name, words(row.predicted), words(row.measured), error, row.note)
    return table


def _table(title: str, columns: list[tuple[str, str]]) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for name, justify in columns:
        table.add_column(name, justify="right" if justify == "r" else "left", no_wrap=True)
    return table


def _ranking(layouts: list[Layout]) -> Table:
    if layouts[0].serving is not None:
        return _serving_ranking(layouts)
    columns = ["#", "dp", "tp", "pp", "cp", "ep", "chunks", "zero", "batch x passes", "recompute"]
    columns += ["memory", "margin", "step", "exposed", "bubble", "tokens/s/GPU", "MFU"]
    table = _table("", [(name, "l" if name == "recompute" else "r") for name in columns])
    days = any(layout.days for layout in layouts)
    if days:
        table.add_column("days", justify="right")
        table.add_column("GPU-hours", justify="right")
    for number, layout in enumerate(layouts, 1):
        step = layout.step
        if step is None:
            continue
        cells = [
            number,
            layout.dp,
            layout.tp,
            layout.pp,
            layout.cp,
            layout.ep,
            layout.interleave,
            layout.zero,
        ]
        row = [str(cell) for cell in cells]
        row += [f"{layout.microbatch} x {layout.microbatches}", layout.recompute]
        row += [gigabytes(layout.memory), gigabytes(layout.margin), duration(step.total)]
        row += [duration(step.exposed), f"{step.bubble_fraction:.1%}"]
        row += [rate(layout.tokens_per_second / layout.world_size), f"{layout.mfu:.1%}"]
        if days:
            row += [f"{layout.days:.1f}", rate(layout.gpu_hours)]
        table.add_row(*row)
    return table


def _serving_ranking(layouts: list[Layout]) -> Table:
    columns = [
        "#",
        "replicas",
        "tp",
        "pp",
        "weights",
        "cache/token",
        "requests",
        "most",
        "first token",
        "next token",
    ]
    columns += ["bound by", "tokens/s", "memory", "margin"]
    table = _table("", [(name, "l" if name == "bound by" else "r") for name in columns])
    for number, layout in enumerate(layouts, 1):
        one = layout.serving
        if one is None:
            continue
        table.add_row(
            str(number),
            str(one.replicas),
            str(layout.tp),
            str(layout.pp),
            gigabytes(one.weight_bytes),
            f"{one.kv_bytes_per_token:,.0f} B",
            str(one.concurrency),
            str(one.max_concurrency),
            duration(one.first_token),
            duration(one.inter_token),
            one.decode_bound_by,
            rate(layout.tokens_per_second),
            gigabytes(layout.memory),
            gigabytes(layout.margin),
        )
    return table


def _memory(layout: Layout) -> Table:
    stages = layout.stages
    names = [name for name in CATEGORIES if any(getattr(stage, name) for stage in stages)]
    table = _table(
        "memory of a rank by stage", [("stage", "r"), *((name, "r") for name in (*names, "total"))]
    )
    for number, stage in enumerate(stages):
        cells = [getattr(stage, name) for name in names] + [stage.total]
        table.add_row(str(number), *(gigabytes(cell) if cell else "-" for cell in cells))
    return table


def _time(layout: Layout) -> Table:
    table = _table("time of a step", [("part", "l"), ("seconds", "r"), ("share", "r")])
    for name, seconds in causes(layout).items():
        if seconds:
            table.add_row(name, duration(seconds), f"{seconds / layout.seconds:.1%}")
    table.add_row("total", duration(layout.seconds), "100.0%")
    return table


def _collectives(layout: Layout) -> Table:
    columns = [("collective", "l"), ("op", "l"), ("axis", "l"), ("link", "l"), ("calls", "r"), ("sent", "r")]
    table = _table("communication of a step", [*columns, ("total", "r"), ("exposed", "r")])
    for each in layout.step.collectives if layout.step else ():
        cells = [each.name, each.op, each.axis, each.link, rate(each.calls), gigabytes(each.bytes)]
        table.add_row(*cells, duration(each.seconds), duration(each.exposed))
    return table


def _placement(layout: Layout) -> str:
    axes = ", ".join(
        f"{axis.name} {axis.size} (ranks {axis.stride} apart, {axis.link})"
        for axis in layout.placement
        if axis.size > 1
    )
    return f"mesh, outermost first: {axes or 'one rank'}"
