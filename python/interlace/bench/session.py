"""One run of a subcommand on one rank: its place, its cases, their times, the rows so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

import interlace

from .capacity import Capacity
from .clock import clock_for
from .cores import place, release
from .journal import Journal
from .machine import describe, one_line, versions
from .metrics import bandwidth, bus_factor, figures, rates, teraflops
from .output import Column
from .paired import fitting_iterations, measure
from .peers import Peer, find_peers, said
from .processes import CTRL_C
from .roof import measure_roof
from .row import Report, Row
from .screen import Screen
from .summary import Timings
from .topology import peer_read_bandwidth
from .trace import Timeline
from .verdict import LIMIT, difference

__all__ = ["Case", "Session"]

BUDGET_SECONDS = {"quick": 0.25, "small": 0.8, "full": 3.0}  # of timing per case
DELAYED = ("fused", "baseline", "collective")  # variants in which ranks meet


class Case(Protocol):
    """What a subcommand measures one after the other."""

    @property
    def name(self) -> str:
        """For the progress bar."""

    @property
    def memory_bytes(self) -> int:
        """What a rank needs for it, about."""

    @property
    def flops(self) -> int:
        """Of one call on a rank; 0 where arithmetic does not decide how long it takes."""

    def identity(self) -> dict[str, Any]:
        """Fields of Row that say which case it is."""


class Session:
    """Cases are checked, timed and written down through it. Everything but `say` is collective.

    settings: those of `options.options`. A wrong result is printed as WRONG and makes the status 1.
    """

    def __init__(self, title: str, columns: Sequence[Column], settings: Mapping[str, object]) -> None:
        torch.set_grad_enabled(False)
        self.settings = settings
        self.placement = place(dist.get_rank(), dist.get_world_size())
        self.group = interlace.resolve(None)
        self.rank, self.world_size = self.group.rank, self.group.world_size
        self.device = torch.device(str(settings.get("device", "cpu")))
        if self.device.type == "cuda":
            torch.cuda.set_device(self.rank % torch.cuda.device_count())
        self._flag = torch.zeros(1)
        self.clock = clock_for(self.device.type)
        self.oversubscribed = self.placement.core is None and len(self.placement.cores) < self.world_size
        self.capacity = Capacity(settings, self.world_size)
        self.report = Report(title, str(settings.get("command", "")))
        self.screen = Screen(columns, settings, self.rank)
        self._wrong = 0
        wanted = settings.get("trace") or settings.get("html")
        self.timeline = Timeline(self.group.name) if wanted and self.device.type == "cpu" else None
        self._begin()

    def _begin(self) -> None:
        machine = describe(len(self.placement.cores), peer_read_bandwidth(self.barrier))
        self.report.machine = machine | {"ranks": self.world_size, "placement": str(self.placement)}
        if self.settings.get("html") or self.settings.get("plot") or self.settings.get("out"):
            self.report.machine["roof"] = measure_roof(self.settings.get("dtype"), self.barrier, self.device)
        self.report.commit = machine["commit"]  # type: ignore[assignment]
        self.report.versions = versions()
        self.report.harness = {
            "overhead_us": self.clock.overhead * 1e6,
            "residual_us": self.clock.residual * 1e6,
        }
        if self.oversubscribed:
            self.warn(
                f"{self.world_size} ranks on {len(self.placement.cores)} core(s): they take turns, and every row is "
                "marked oversubscribed; use --ranks or more cores for numbers"
            )
        self.journal = Journal(self.settings.get("journal"), self.report, self.rank)

    @property
    def quick(self) -> bool:
        """Few cases, few iterations."""
        return self.size == "quick"

    @property
    def size(self) -> str:
        """quick, small or full."""
        return size_of(self.settings)

    def barrier(self) -> None:
        """All ranks leave within a hop of a flag: an all-reduce on the symmetric heap, else torch.distributed's."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        interlace.functional.all_reduce(self._flag, group=self.group.name)

    @property
    def backend(self) -> str:
        """What carries torch's collectives here: gloo or nccl."""
        return "nccl" if self.device.type == "cuda" else "gloo"

    def peers(self) -> list[Peer]:
        """Other libraries to compare with, found once; said on the screen, with those that are absent."""
        found = find_peers(self.settings, self.device, self.group.name)
        self.report.peers = [peer.entry() for peer in found]
        self.say(said(found))
        return found

    def say(self, text: str) -> None:
        """On rank 0's screen."""
        self.screen.say(text)

    def warn(self, text: str) -> None:
        """Said, and kept in the report."""
        self.report.warnings.append(text)
        self.say(f"warning: {text}")

    # ---- one case

    def check(self, what: str, got: Tensor, want: Tensor, limit: float = 0.0) -> bool:
        """Compare with the oracle on every rank. Shapes must agree too; all ranks get the same answer.

        limit: what may be off relative to the largest value, where that is more than a single product's rounding. The
        next row is marked wrong, with the number of values that are off on all ranks.
        """
        limit = max(limit, LIMIT[got.dtype])
        worst, count = difference(got, want, limit)
        values = torch.tensor([worst, float(count)], dtype=torch.float64)
        gathered = [torch.empty_like(values) for _ in range(self.world_size)]
        dist.all_gather(gathered, values)
        worst, total = max(float(v[0]) for v in gathered), int(sum(float(v[1]) for v in gathered))
        if total:
            self._wrong += total
            self.report.wrong.append(what)
            self.say(f"WRONG {what}: off by {worst:.2e} of the largest, limit {limit:.1e}, {total} values")
            self.journal.head()
        return not total

    def time(self, variants: Mapping[str, Callable[[], object]], budget: float = 1.0) -> Timings:
        """Paired times of the variants, A B B A, slowest rank; `budget` times the seconds of this --size."""
        seconds = BUDGET_SECONDS[self.size] * budget
        count = fitting_iterations(variants, seconds, fewest=7, most=301, barrier=self.barrier)
        seed = int(str(self.settings.get("seed", 0)))
        return measure(
            variants, iterations=count, warmup=0, seed=seed, barrier=self.barrier, clock=self.clock
        )

    def record(
        self, variants: Mapping[str, Callable[[], object]], *, budget: float = 1.0, **about: Any
    ) -> Row:
        """Time the variants and write the row; with --straggler, another one with the last rank late.

        Variants are named as `metrics.figures` wants them; `about` is what `row` takes.
        """
        variants = wanted(variants, self.settings)
        row = self.row(self.time(variants, budget), **about)
        self.add(row)
        late = self.settings.get("straggler")
        if late:
            microseconds = float(str(late))
            slow = {name: self._late(call, microseconds) for name, call in variants.items() if meets(name)}
            self.add(self.row(self.time(slow, budget), **about, straggler_us=microseconds, x_floor=None))
        self._wrong = 0
        if self.timeline is not None:
            self.timeline.offer(variants, row)
        return row

    def _late(self, call: Callable[[], object], microseconds: float) -> Callable[[], object]:
        """The call, which the last rank begins that much later. It spins: a sleep is 60 us off."""
        if self.rank != self.world_size - 1:
            return call

        def run() -> object:
            until = time.perf_counter() + microseconds * 1e-6
            while time.perf_counter() < until:
                pass
            return call()

        return run

    def row(
        self,
        timings: Timings,
        *,
        flops: int | None = None,
        bus: str | None = None,
        extra: Mapping[str, object] | None = None,
        **identity: Any,
    ) -> Row:
        """The row of these times. flops: of one call on this rank. bus: the collective whose bus bandwidth `bytes`
        of identity give. extra: what else stands there. identity: fields of Row."""
        found: dict[str, Any] = figures(timings)
        took = found["fused_us"]
        if self.world_size == 1:
            found["overlap_efficiency"] = None  # "collective" is a copy then, and there is nothing to hide
        found["extra"] |= extra or {}
        if flops:
            found["tflops"] = teraflops(flops, took)
        if bus:
            found["algbw_gbps"] = bandwidth(identity["bytes"], took)
            found["busbw_gbps"] = found["algbw_gbps"] * bus_factor(bus, self.world_size)
        if identity.get("tokens"):
            found["extra"] |= rates(identity["tokens"], found)
        if found["kept"] < found["taken"] / 2:
            found["note"] = f"busy machine: {found['kept']} of {found['taken']} undisturbed"
        return Row(**{"world_size": self.world_size, **found, **identity})

    def add(self, row: Row) -> None:
        """Write down a row, marked with what is known of it: wrong, oversubscribed."""
        row = self.screen.marked(row, self._wrong, self.oversubscribed)
        if not self.report.rows:
            self.screen.opening([one_line(self.report.machine), str(self.placement)])
        self.report.rows.append(row)
        self.journal.row(row)
        self.screen.row(row)

    def skip(self, reason: str, **identity: Any) -> None:
        """A row that says why there is no number."""
        self.add(Row(**{"world_size": self.world_size, **identity, "skipped": reason}))

    # ---- all cases

    def run(self, cases: Iterable[Case], one: Callable[[Any], None]) -> int:
        """`one` for every case that fits this machine; the exit status: 1 when anything was wrong, 130 after Ctrl-C."""
        listed = list(cases)
        try:
            with self.screen.progress(self.report.benchmark, len(listed)) as step:
                for case in listed:
                    step(case.name)
                    reason = self.capacity.lacking(case)
                    if reason:
                        self.skip(reason, **case.identity())
                    else:
                        one(case)
                    self._wrong = 0
        except KeyboardInterrupt:
            return CTRL_C
        return self.finish()

    def finish(self) -> int:
        """The report is whole; 1 when anything was wrong, on every rank."""
        if not self.report.rows:
            self.warn("no case was left to measure")
        times = [row.fused_us for row in self.report.rows if row.fused_us]
        if times:
            self.report.harness["largest_share"] = self.report.harness["residual_us"] / min(times)
        self.screen.closing(self.report)
        release(self.placement)
        self.report.timeline = self.timeline.entry() if self.timeline is not None else {}
        self.journal.head(partial=False)
        return 1 if self.report.wrong else 0


def meets(name: str) -> bool:
    """Whether ranks meet in the variant of this name."""
    return name in DELAYED or name.startswith("peer:")


def wanted(
    variants: Mapping[str, Callable[[], object]], settings: Mapping[str, object]
) -> dict[str, Callable[[], object]]:
    """The variants that are timed: without those of peers after --no-peers."""
    peers = settings.get("peers", True)
    return {name: call for name, call in variants.items() if peers or not name.startswith("peer:")}


def size_of(settings: Mapping[str, object]) -> str:
    """quick, small or full: --quick wins over --size."""
    return "quick" if settings.get("quick") else str(settings.get("size", "full"))
