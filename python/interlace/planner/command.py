"""`interlace plan`: which DP x TP x PP x CP (x EP), and why."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from .architecture import Architecture, config_names, read_architecture, read_config
from .cluster import Cluster, preset_names, read_cluster
from .explain import explain
from .layout import Layout
from .model import count_parameters
from .pipeline import SCHEDULES
from .search import plan
from .snippet import launch_line, serving_snippet, train_line, training_snippet
from .workload import DTYPES, OPTIMIZER_BYTES, RECOMPUTES, Serving, Training

__all__ = ["Answer", "BadInput", "plan_command"]


class BadInput(click.ClickException):
    """One line on stderr, exit code 2."""

    exit_code = 2


class OneLineCommand(click.Command):
    """A command whose usage errors are one line as well."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            raise BadInput(" ".join(error.format_message().split())) from error


@dataclass(frozen=True)
class Answer:
    """Everything the outputs (table, JSON, picture, page) are made of; layouts are ranked, the first is the best.

    config: the model's config where it came as text or by name, and no file can be named.
    """

    model: str
    arch: Architecture
    cluster: Cluster
    workload: Training | Serving
    gpus: int
    headroom: float
    layouts: list[Layout]
    config: Mapping[str, Any] | None = None

    @property
    def limit(self) -> float:
        """Bytes a rank may use."""
        return self.layouts[0].limit

    @property
    def program(self) -> str:
        """Source of a program that runs the best layout."""
        per_node = self.cluster.devices_per_node
        if isinstance(self.workload, Serving):
            return serving_snippet(self.layouts[0], per_node, self.config)
        return training_snippet(self.layouts[0], self.workload, self.arch.layers, per_node, self.config)

    @property
    def commands(self) -> list[str]:
        """Command lines that start the program and, for training, `interlace train`."""
        per_node, best = self.cluster.devices_per_node, self.layouts[0]
        argument = f" {shlex.quote(self.model)}" if self.config is None else ""
        if isinstance(self.workload, Serving):
            return [launch_line(Layout(1, best.tp, best.pp, 1), per_node, f"serve.py{argument}")]
        lines = [launch_line(best, per_node, f"layout.py{argument}")]
        trained = train_line(best, self.workload, per_node, self.model)
        return [*lines, *([trained] if trained else [])]


def _one_of(names: Any) -> str:
    return ", ".join(names)


@click.command(name="plan", cls=OneLineCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", help="A config.json, its folder, its text as JSON, or a name of --list.")
@click.option("--cluster", help="A preset of --list or a YAML file.  [default: h100x8]")
@click.option("--gpus", type=int, help="Number of devices (ranks).")
@click.option("--seq", type=int, help="Training: tokens per sequence.")
@click.option("--global-batch", type=int, help="Training: sequences per optimizer step.")
@click.option("--dtype", default="bf16", show_default=True, help=f"One of {_one_of(DTYPES)}.")
@click.option("--optimizer", default="adamw", show_default=True, help=f"One of {_one_of(OPTIMIZER_BYTES)}.")
@click.option("--recompute", default="auto", show_default=True, help=f"auto, {_one_of(RECOMPUTES)}.")
@click.option("--zero", default="auto", show_default=True, help="auto, 0, 1, 2 or 3.")
@click.option("--schedule", default="auto", show_default=True, help=f"auto, {_one_of(SCHEDULES)}.")
@click.option("--tokens", type=float, default=0.0, help="Tokens of the whole run, for days and GPU-hours.")
@click.option("--fp32-gradients", is_flag=True, help="Gradients are summed in fp32.")
@click.option("--serving", is_flag=True, help="Plan a deployment instead of a training run.")
@click.option("--concurrency", type=int, default=64, show_default=True, help="Serving: requests in flight.")
@click.option("--prompt", type=int, default=2048, show_default=True, help="Serving: tokens of a prompt.")
@click.option("--output", type=int, default=256, show_default=True, help="Serving: tokens of an answer.")
@click.option("--kv-dtype", default="bf16", show_default=True, help="Serving: of the cache.")
@click.option("--headroom", type=float, default=0.05, show_default=True, help="Share of memory kept free.")
@click.option("--top", type=int, default=10, show_default=True, help="Layouts to show.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--explain", "explained", is_flag=True, help="Print every formula with its numbers and source.")
@click.option("--plot", type=click.Path(dir_okay=False), help="Write a PNG (needs matplotlib).")
@click.option("--html", type=click.Path(dir_okay=False), help="Write one self-contained page.")
@click.option(
    "--snippet", type=click.Path(dir_okay=False), help="Write the program that runs the best layout."
)
@click.option(
    "--measure", type=click.Path(dir_okay=False), help="Measure this machine into a YAML file for --cluster."
)
@click.option(
    "--verify",
    type=click.Path(dir_okay=False),
    help="Compare the run.json of `interlace train` with the plan; its time too, with --cluster.",
)
@click.option("--list", "listed", is_flag=True, help="List models and clusters that have a name.")
def plan_command(**options: Any) -> None:
    """Rank the layouts DP x TP x PP x CP (x EP) of a model on a cluster by time, within its memory, and say why."""
    try:
        if options["listed"]:
            click.echo(f"models: {_one_of(config_names())}\nclusters: {_one_of(preset_names())}")
        elif options["measure"]:
            _measure(options["measure"])
        elif options["verify"]:
            _verify(options["verify"], options["cluster"], options["as_json"])
        else:
            _answer(options)
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise BadInput(" ".join(str(error).split())) from error


def _answer(options: dict[str, Any]) -> None:
    answer = solve(options)
    if options["snippet"]:
        Path(options["snippet"]).write_text(answer.program, encoding="utf-8")
    if options["plot"]:
        from .plot import write_plot

        write_plot(answer, options["plot"])
    if options["html"]:
        from .page import write_page

        write_page(answer, options["html"], options["top"])
    if options["as_json"]:
        click.echo(json.dumps(as_record(answer, options["top"], options["explained"]), indent=1))
    else:
        _print(answer, options["top"], options["explained"])


def solve(options: dict[str, Any]) -> Answer:
    """The Answer to the options of the command line. Raises ValueError in one line."""
    for name in ("model", "gpus"):
        if options[name] is None:
            raise ValueError(f"plan: --{name} is missing")
    if options["top"] < 1:
        raise ValueError(f"plan: --top {options['top']} must be at least 1")
    name, source, config = _model(options["model"])
    arch, cluster = read_architecture(source), read_cluster(options["cluster"] or "h100x8")
    workload = _serving(options) if options["serving"] else _training(options)
    given = {"serving": workload} if isinstance(workload, Serving) else {"training": workload}
    gpus, headroom = options["gpus"], options["headroom"]
    layouts = plan(arch, cluster=cluster, gpus=gpus, headroom=headroom, **given)
    return Answer(name, arch, cluster, workload, gpus, headroom, layouts, config)


def _model(text: str) -> tuple[str, Any, Mapping[str, Any] | None]:
    """(name, source, config) of --model; the config where there is no file to name: JSON text or a shipped name."""
    if not text.lstrip().startswith("{"):
        shipped = text.lower() in config_names() and not Path(text).exists()
        return text, text, read_config(text) if shipped else None
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"plan: --model is not JSON: {error}") from error
    return str(config.get("model_type", "config.json")), config, config


def _training(options: dict[str, Any]) -> Training:
    for name in ("seq", "global_batch"):
        if options[name] is None:
            raise ValueError(
                f"plan: --{name.replace('_', '-')} is missing (or plan a deployment with --serving)"
            )
    zero = options["zero"]
    if zero not in ("auto", "0", "1", "2", "3"):
        raise ValueError(f"plan: --zero {zero} is not a ZeRO stage; expected auto, 0, 1, 2 or 3")
    return Training(
        global_batch=options["global_batch"],
        seq=options["seq"],
        dtype=options["dtype"],
        optimizer=options["optimizer"],
        recompute="" if options["recompute"] == "auto" else options["recompute"],
        zero=None if zero == "auto" else int(zero),
        schedule="" if options["schedule"] == "auto" else options["schedule"],
        tokens=options["tokens"],
        fp32_gradients=options["fp32_gradients"],
    )


def _serving(options: dict[str, Any]) -> Serving:
    return Serving(
        concurrency=options["concurrency"],
        prompt=options["prompt"],
        output=options["output"],
        dtype=options["dtype"],
        kv_dtype=options["kv_dtype"],
    )


def as_record(answer: Answer, top: int, explained: bool) -> dict[str, Any]:
    """What --json prints; bytes, seconds, counts."""
    total, active = count_parameters(answer.arch)
    record: dict[str, Any] = {
        "model": {"name": answer.model, "family": answer.arch.family, "parameters": total, "active": active},
        "cluster": {
            "name": answer.cluster.name,
            "device": answer.cluster.device.name,
            "source": answer.cluster.source,
        },
        "gpus": answer.gpus,
        "workload": asdict(answer.workload),
        "limit": answer.limit,
        "layouts_that_fit": len(answer.layouts),
        "layouts": [layout.to_dict() for layout in answer.layouts[:top]],
        "snippet": answer.program,
        "commands": answer.commands,
    }
    if explained:
        formulas = explain(answer.arch, answer.cluster, answer.workload, answer.layouts[0])
        record["formulas"] = [asdict(formula) for formula in formulas]
    return record


def _print(answer: Answer, top: int, explained: bool) -> None:
    from rich.console import Console

    from .table import headline, print_layouts

    console = Console(soft_wrap=True) if sys.stdout.isatty() else Console(width=200, soft_wrap=True)
    text = headline(answer.arch, answer.cluster, answer.workload, answer.gpus, answer.model, answer.limit)
    console.print(text, highlight=False, markup=False)
    console.print()
    print_layouts(answer.layouts, top, console)
    if explained:
        console.print("\n[bold]Formulas[/bold]")
        for formula in explain(answer.arch, answer.cluster, answer.workload, answer.layouts[0]):
            click.echo(
                f"  {formula.name} = {formula.formula}\n    = {formula.numbers}\n    = {formula.value}"
            )
            click.echo(f"    source: {formula.source}")
    console.print("\n[bold]Run it[/bold]")
    for line in answer.commands:
        click.echo(f"  {line}")
    click.echo(f"\n{answer.program}", nl=False)


def _measure(path: str) -> None:
    from .measure import measure

    click.echo("measuring this machine, about a minute", err=True)
    cluster = measure(path)
    click.echo(f"{path}: {cluster.name}; use it with --cluster {path}")


def _verify(path: str, cluster: str | None, as_json: bool) -> None:
    from .verify import verify

    rows = verify(path, cluster)
    if as_json:
        click.echo(json.dumps([asdict(row) for row in rows], indent=1))
        return
    from rich.console import Console

    from .table import verification

    Console(width=None if sys.stdout.isatty() else 120).print(verification(rows))
    if cluster is None:
        click.echo("time is compared with --cluster PROFILE, which `interlace plan --measure PROFILE` writes")
