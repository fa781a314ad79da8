"""A decoder on 1, 2, .. ranks: the same work on more of them (strong), and work that grows with them (weak).

Efficiency is the time of one rank / (ranks x time) for strong, time of one rank / time for weak scaling; the
denominator is the unsplit model of torch in one process on one core. The fit has two numbers: the serial fraction f of
Amdahl's law, from the compute alone, T1 (f + (1 - f) / n), and the exposed time a token costs, x 2 (n - 1) / n, as a
ring moves it. Worlds with more ranks than cores are measured and marked, and not fitted. planner: what `interlace plan`
says of the same step, from a profile of this machine that it measures first.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from interlace.pretrained import Decoder

from .decoders import (
    SIZES,
    Sizes,
    build,
    clone,
    dtype_name,
    narrowed,
    split_by_interlace,
    split_by_torch,
    step_of,
)
from .output import Column
from .prediction import Prediction, predictions
from .row import Report
from .session import Session, size_of
from .shapes import dtypes_of
from .steps import readme_of
from .summary import Timings
from .verdict import relative_error

__all__ = [
    "COLUMNS",
    "DEVICES",
    "Fit",
    "ScalingCase",
    "Time",
    "cases",
    "fit",
    "readme",
    "run",
    "speedup",
    "worlds_of",
]

DEVICES = ("cpu",)
TRANSFORMER = {
    "quick": replace(SIZES["small"], layers=1, vocabulary=1024),
    "small": replace(SIZES["small"], layers=2, vocabulary=4096),
    "full": replace(SIZES["small"], layers=4, vocabulary=8192),
}
TOKENS = {
    "quick": 64,
    "small": 128,
    "full": 256,
}  # of a rank in weak scaling; strong has twice as many in all
PHASES = {"quick": ("train",), "small": ("prefill", "train"), "full": ("prefill", "train")}
DENOMINATOR = "the unsplit model of torch, one process, one core"

COLUMNS = [
    Column("scaling", "case", width=20),
    Column("dtype", "dtype", width=8),
    Column("ranks", "world_size", "{}", 5),
    Column("tokens", "tokens", "{}", 6),
    Column("ms", "milliseconds", "{:.1f}", 8),
    Column("tokens/s", "tokens_per_second", "{:,.0f}"),
    Column("speed-up", "speedup_over_one", "{:.2f}", 8),
    Column("efficiency", "efficiency", "{:.1%}", 10),
    Column("fit", "fit_speedup", "{:.2f}", 6),
    Column("planner", "planner_speedup", "{:.2f}", 7),
    Column("its ms", "planner_ms", "{:.1f}", 8),
    Column("off by", "planner_error", "{:+.0%}", 6),
    Column("exposed", "exposed_us", "{:.0f}", 8),
    Column("torch", "baseline_speedup_over_one", "{:.2f}", 6),
    Column("x torch", "speedup", "{:.2f}", 7),
]


README = [
    Column("scaling", "case"),
    Column("dtype", "dtype"),
    Column("ranks", "world_size"),
    Column("tokens", "tokens", "{:,}"),
    Column("ms", "milliseconds", "{:.1f}"),
    Column("speed-up", "speedup_over_one", "{:.2f}"),
    Column("efficiency", "efficiency", "{:.0%}"),
    Column("fit", "fit_speedup", "{:.2f}"),
    Column("planner", "planner_speedup", "{:.2f}"),
    Column("its ms off by", "planner_error", "{:+.0%}"),
    Column("torch's speed-up", "baseline_speedup_over_one", "{:.2f}"),
]


@dataclass(frozen=True)
class ScalingCase:
    """A phase in one dtype on all worlds."""

    sizes: Sizes
    phase: str
    dtype: torch.dtype
    tokens: int
    worlds: tuple[int, ...]

    @property
    def name(self) -> str:
        """For the progress bar."""
        return f"{self.phase} {dtype_name(self.dtype)}"

    @property
    def memory_bytes(self) -> int:
        """Six models, some of them with gradients, and activations."""
        tokens = 2 * self.tokens * max(self.worlds)
        return 12 * self.sizes.parameters * self.dtype.itemsize + 200 * tokens * self.sizes.intermediate

    @property
    def flops(self) -> int:
        """Of the whole work on one rank."""
        each = 2 * self.sizes.parameters * 2 * self.tokens
        return each * (3 if self.phase == "train" else 1)

    def identity(self) -> dict[str, Any]:
        """Fields of Row."""
        return {
            "op": "scaling",
            "case": f"{self.sizes.layers}-layer {self.phase}",
            "dtype": dtype_name(self.dtype),
        }

    def work(self, mode: str, ranks: int) -> int:
        """Tokens on so many ranks: twice the weak share of one rank in strong scaling."""
        return 2 * self.tokens if mode == "strong" else self.tokens * ranks


def worlds_of(settings: Mapping[str, Any], world_size: int) -> tuple[int, ...]:
    """--worlds, or 1, 2, 4, .. to the number of ranks. ValueError for a world that the ranks do not hold."""
    given = settings.get("worlds")
    if not given:
        return tuple(w for w in (1, 2, 4, 8) if w <= world_size)
    try:
        found = tuple(sorted({1, *(int(text) for text in str(given).split(","))}))
    except ValueError:
        found = ()
    if not found or found[0] < 1 or found[-1] > world_size:
        example = ",".join(map(str, range(1, world_size + 1)))
        raise ValueError(
            f"bench: --worlds {given}; expected counts up to --ranks {world_size}, like {example}"
        )
    return found


def cases(settings: Mapping[str, Any], world_size: int) -> list[ScalingCase]:
    """Every phase and dtype."""
    size = size_of(settings)
    worlds = worlds_of(settings, world_size)
    dtypes = dtypes_of(settings)[: 1 if size == "quick" else None]
    return [
        ScalingCase(TRANSFORMER[size], phase, dtype, TOKENS[size], worlds)
        for dtype, phase in itertools.product(dtypes, PHASES[size])
    ]


# ---- arithmetic


@dataclass(frozen=True)
class Time:
    """Microseconds of one world: all of it, its compute alone, what is exposed."""

    ranks: int
    tokens: int
    total: float
    compute: float
    exposed: float


@dataclass(frozen=True)
class Fit:
    """Amdahl's serial fraction of the compute, and exposed microseconds of a token at 2 (n - 1) / n = 1."""

    serial: float
    communication: float
    points: int

    def total(self, one: float, ranks: int, tokens: int) -> float:
        """Microseconds of `tokens` on so many ranks, when one rank takes `one` for them."""
        moved = 2.0 * (ranks - 1) / ranks
        return one * (self.serial + (1.0 - self.serial) / ranks) + self.communication * tokens * moved


def fit(one_of: Callable[[int], float], times: Sequence[Time]) -> Fit | None:
    """Least squares over worlds of two ranks and more; None without one. one_of(tokens): of one rank, microseconds.

    Both numbers are at least 0: faster than ideal is noise or cache, not a negative fraction.
    """
    found = [t for t in times if t.ranks > 1]
    if not found:
        return None
    # compute / one - 1 / n = f (1 - 1 / n)
    bases = [(1.0 - 1.0 / t.ranks, t.compute / one_of(t.tokens) - 1.0 / t.ranks) for t in found]
    serial = sum(x * y for x, y in bases) / sum(x * x for x, _ in bases)
    bases = [(t.tokens * 2.0 * (t.ranks - 1) / t.ranks, t.exposed) for t in found]
    communication = sum(x * y for x, y in bases) / sum(x * x for x, _ in bases)
    return Fit(min(1.0, max(0.0, serial)), max(0.0, communication), len(found))


def speedup(mode: str, ranks: int, one: float, total: float) -> float:
    """Times the work of one rank in the same time: one / total, x ranks where the work grew with them."""
    return one / total * (ranks if mode == "weak" else 1)


# ---- measuring


@dataclass(frozen=True)
class World:
    """The first `ranks` ranks at work, the others idle. group: None on the idle ones."""

    ranks: int
    group: Any
    oversubscribed: bool


def worlds(session: Session, counts: Sequence[int]) -> list[World]:
    """A process group per world. Collective."""
    cores = len(session.placement.cores)
    return [World(n, dist.new_group(list(range(n))), n > cores) for n in counts]


def pin(session: Session, world: World) -> None:
    """A core for every rank of the world; any core when there are too few, and for idle ranks."""
    cores = session.placement.cores
    if session.placement.core is not None or not hasattr(os, "sched_setaffinity"):
        return  # pinned for good: as many cores as ranks
    alone = session.rank < world.ranks <= len(cores)
    os.sched_setaffinity(0, {cores[session.rank]} if alone else set(cores))


def measure(session: Session, case: ScalingCase, world: World, tokens: int, whole: nn.Module) -> Timings:
    """Checked and timed: interlace, torch, and the compute alone, on one world. Collective over all ranks."""
    pin(session, world)
    ids = torch.randint(0, case.sizes.vocabulary, (1, tokens), generator=torch.Generator().manual_seed(1))
    trained = case.phase == "train"
    variants: dict[str, Callable[[], object]] = dict.fromkeys(("fused", "baseline", "compute"), lambda: None)
    if world.ranks == 1:
        if session.rank == 0:
            variants["fused"] = call_of(case, clone(whole, trained=trained), ids)
        return session.time({"fused": variants["fused"]})
    got = want = {name: torch.zeros(1) for name in ("fused", "baseline")}
    limit = 0.0
    if session.rank < world.ranks:
        exact = result_of(case, clone(whole, trained=False).float(), ids)
        limit = 2 * relative_error(result_of(case, clone(whole, trained=False), ids), exact)
        ours = split_by_interlace(clone(whole, trained=trained), world.group)
        theirs = split_by_torch(clone(whole, trained=trained), world.group)
        narrow = narrowed(case.sizes, world.ranks, case.dtype).requires_grad_(trained)
        got = {"fused": result_of(case, ours, ids), "baseline": result_of(case, theirs, ids)}
        want = dict.fromkeys(got, exact)
        variants = {"fused": call_of(case, ours, ids), "baseline": call_of(case, theirs, ids)}
        variants["compute"] = call_of(case, narrow, ids % narrow.config.vocab_size)  # type: ignore[union-attr,operator]
    floor = 1e-4 if case.dtype is torch.float32 else 2e-2
    for name in got:
        session.check(f"{case.name} on {world.ranks} ranks, {name}", got[name], want[name], max(limit, floor))
    return session.time(variants)


def call_of(case: ScalingCase, model: nn.Module, ids: Tensor) -> Callable[[], object]:
    """A prompt, or a step of training."""
    if case.phase == "train":
        return step_of(model.train(), ids)
    model.eval()
    return lambda: Decoder(model)(ids)


def result_of(case: ScalingCase, model: nn.Module, ids: Tensor) -> Tensor:
    """The logits of the last token."""
    logits: Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits
    return logits.float()


def one(
    session: Session, case: ScalingCase, every: Sequence[World], planned: Mapping[Any, Prediction]
) -> None:
    """Measure all worlds, fit, and write a row per mode and world."""
    whole = build(case.sizes, case.dtype).requires_grad_(False)
    taken: dict[tuple[int, int], Timings] = {}
    for mode, world in itertools.product(("strong", "weak"), every):
        at = (world.ranks, case.work(mode, world.ranks))
        if at not in taken:
            taken[at] = measure(session, case, world, at[1], whole)
    for mode in ("strong", "weak"):
        _rows(session, case, mode, every, taken, planned)


def _rows(
    session: Session,
    case: ScalingCase,
    mode: str,
    every: Sequence[World],
    taken: Mapping[tuple[int, int], Timings],
    planned: Mapping[Any, Prediction],
) -> None:
    first = case.work(mode, 1)
    base = taken[1, first].summary("fused").median * 1e6

    def one_of(tokens: int) -> float:
        return base * tokens / first

    times = [
        _time(taken[world.ranks, case.work(mode, world.ranks)], world.ranks, case.work(mode, world.ranks))
        for world in every
        if not world.oversubscribed and world.ranks > 1
    ]
    fitted = fit(one_of, times)
    for world in every:
        tokens = case.work(mode, world.ranks)
        timings = taken[world.ranks, tokens]
        mine = timings.summary("fused").median * 1e6
        theirs = timings.summary("baseline" if world.ranks > 1 else "fused").median * 1e6
        gain = speedup(mode, world.ranks, base, mine)
        told: dict[str, object] = {
            "mode": mode, "phase": case.phase, "denominator": DENOMINATOR, "milliseconds": mine / 1e3,
            "speedup_over_one": gain, "efficiency": gain / world.ranks,
            "baseline_speedup_over_one": speedup(mode, world.ranks, base, theirs),
        }  # fmt: skip
        if fitted is not None:
            total = fitted.total(one_of(tokens), world.ranks, tokens)
            told |= {
                "fit_speedup": speedup(mode, world.ranks, base, total), "serial_fraction": fitted.serial,
                "communication_us_per_token": fitted.communication, "fitted_worlds": fitted.points,
            }  # fmt: skip
        told |= _predicted(planned, case, mode, world, tokens, mine)
        session.oversubscribed = world.oversubscribed
        about = case.identity()
        about["case"] = f"{mode} {about['case']}"
        row = session.row(timings, extra=told, tokens=tokens, **about, world_size=world.ranks)
        session.add(replace(row, baseline="parallelize_module" if world.ranks > 1 else None))


def _time(timings: Timings, ranks: int, tokens: int) -> Time:
    total, compute = (timings.summary(name).median * 1e6 for name in ("fused", "compute"))
    return Time(ranks, tokens, total, compute, timings.difference("fused", "compute") * 1e6)


def _predicted(
    planned: Mapping[Any, Prediction],
    case: ScalingCase,
    mode: str,
    world: World,
    tokens: int,
    measured: float,
) -> dict[str, object]:
    """What the planner says, where it was asked and there are cores for it."""
    said = planned.get((world.ranks, dtype_name(case.dtype)))
    single = planned.get((1, dtype_name(case.dtype)))
    if said is None or single is None:
        return {}
    microseconds = said.seconds(case.phase, tokens) * 1e6
    base = single.seconds(case.phase, case.work(mode, 1)) * 1e6
    return {
        "planner_us": microseconds,
        "planner_ms": microseconds / 1e3,
        "planner_error": microseconds / measured - 1.0,
        "planner_speedup": speedup(mode, world.ranks, base, microseconds),
    }


def readme(report: Report) -> str:
    """A line per mode and world; one that has more ranks than cores says so."""
    return readme_of(report, README, notes=True)


def run(settings: Mapping[str, object]) -> int:
    """On every rank."""
    session = Session("scaling", COLUMNS, settings)
    found = cases(settings, session.world_size)
    every = worlds(session, found[0].worlds)
    asked = settings.get("planner")
    planned: dict[Any, Prediction] = {}
    if asked if asked is not None else not session.quick:
        counts = [world.ranks for world in every if not world.oversubscribed]
        planned = predictions(session, found[0].sizes, counts, [dtype_name(case.dtype) for case in found])
    return session.run(found, lambda case: one(session, case, every, planned))
