"""The answer of the planner: one frozen Layout with its memory, its time and what it lost by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .memory import MemoryBreakdown

__all__ = ["Axis", "Collective", "Layout", "ServingEstimate", "StepTime"]


@dataclass(frozen=True)
class Axis:
    """One mesh axis: its size, how many ranks its members are apart, and the link its groups cross."""

    name: str
    size: int
    stride: int
    link: str


@dataclass(frozen=True)
class Collective:
    """Communication of one kind within one optimizer step of the slowest rank.

    seconds: time on the wire. exposed: the part no computation hides. bytes: what one rank sends. calls: how often.
    how: what hides the rest.
    """

    name: str
    op: str
    axis: str
    link: str
    calls: int
    bytes: float
    seconds: float
    exposed: float
    how: str


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, as the slowest pipeline stage sees them.

    compute: forward and backward of all microbatches. recompute: forward work done again. bubble: waiting for other
    stages. optimizer: the update. collectives: total and exposed seconds of each.
    bubble_of: what bubble_fraction is relative to.
    """

    compute: float
    recompute: float
    bubble: float
    optimizer: float
    collectives: tuple[Collective, ...]
    bubble_fraction: float = 0.0
    bubble_of: str = "the whole pipelined part of the step"

    @property
    def exposed(self) -> float:
        """Seconds of communication that nothing hides."""
        return sum(each.exposed for each in self.collectives)

    @property
    def communication(self) -> float:
        """Seconds of communication, hidden or not."""
        return sum(each.seconds for each in self.collectives)

    @property
    def total(self) -> float:
        """compute + recompute + bubble + optimizer + exposed."""
        return self.compute + self.recompute + self.bubble + self.optimizer + self.exposed


@dataclass(frozen=True)
class ServingEstimate:
    """What one deployment of tp x pp ranks per replica reaches; seconds, bytes and tokens/s.

    max_concurrency: requests of prompt + output tokens that fit all replicas. concurrency: those in flight, asked or
    what fits. first_token: one request's prefill on an idle replica. inter_token: one decode step of the batch of a
    replica. prefill_bounds, decode_bounds: seconds by cause; the step takes max(compute, memory) + all_reduce.
    """

    replicas: int
    weight_bytes: float
    kv_bytes_per_token: float
    max_concurrency: int
    concurrency: int
    first_token: float
    inter_token: float
    tokens_per_second: float
    prefill_bounds: Mapping[str, float]
    decode_bounds: Mapping[str, float]
    decode_bound_by: str


@dataclass(frozen=True)
class Layout:
    """How ranks are laid out: world = dp x tp x pp x cp, and ep divides dp x cp x tp.

    microbatch: sequences of one rank and one pass. microbatches: passes per step. stages: memory of a rank of each
    pipeline stage. limit: bytes a rank may use. placement: the mesh axes, outermost first. lost: why the layouts
    before it are better; "" for the first. flops: model FLOPs of one step (recompute not counted), for MFU.
    Exactly one of step (training) and serving is set.
    """

    dp: int
    tp: int
    pp: int
    cp: int
    ep: int = 1
    interleave: int = 1
    zero: int = 1
    microbatch: int = 1
    microbatches: int = 1
    recompute: str = "none"
    schedule: str = "1f1b"
    sequence_parallel: bool = True
    placement: tuple[Axis, ...] = ()
    stages: tuple[MemoryBreakdown, ...] = ()
    limit: float = 0.0
    step: StepTime | None = None
    serving: ServingEstimate | None = None
    tokens_per_second: float = 0.0
    mfu: float = 0.0
    flops: float = 0.0
    days: float = 0.0
    gpu_hours: float = 0.0
    lost: str = ""
    notes: tuple[str, ...] = field(default=())

    @property
    def world_size(self) -> int:
        """dp x tp x pp x cp."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def memory(self) -> float:
        """Bytes of the fullest stage."""
        return max((stage.total for stage in self.stages), default=0.0)

    @property
    def fullest_stage(self) -> int:
        """Index of the stage with the most bytes."""
        totals = [stage.total for stage in self.stages]
        return totals.index(max(totals))

    @property
    def margin(self) -> float:
        """Bytes left on the fullest stage; negative when it does not fit."""
        return self.limit - self.memory

    @property
    def fits(self) -> bool:
        """Whether every stage stays within the limit."""
        return self.margin >= 0.0

    @property
    def seconds(self) -> float:
        """Seconds of one optimizer step, or between two tokens of a served request."""
        if self.step is not None:
            return self.step.total
        return self.serving.inter_token if self.serving is not None else 0.0

    @property
    def name(self) -> str:
        """The sizes in one line, for example `dp8 tp4 pp4 cp4 ep1`."""
        return f"dp{self.dp} tp{self.tp} pp{self.pp} cp{self.cp} ep{self.ep}"

    def to_dict(self) -> dict[str, Any]:
        """The layout as plain numbers, strings, lists and dicts, as `interlace plan --json` prints it."""
        record = asdict(self)
        record["stages"] = [{**asdict(stage), "total": stage.total} for stage in self.stages]
        if self.step is not None:
            record["step"] |= {"total": self.step.total, "exposed": self.step.exposed}
        record |= {
            "world_size": self.world_size,
            "memory": self.memory,
            "margin": self.margin,
            "fits": self.fits,
            "seconds": self.seconds,
        }
        return record
