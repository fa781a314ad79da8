"""Attention over a split sequence against one process: time, balance, what moves, what it holds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from .. import functional
from ..context_parallel import work_of
from ..functional.attention import LAYOUTS, spans_of, tokens_of
from ..windows import window_bytes
from .output import Column, short, table
from .peak import peak_bytes
from .row import Report, Row
from .session import Session, size_of
from .shapes import dtypes_of

__all__ = ["COLUMNS", "AttentionCase", "cases", "readme", "run"]

TOKENS = {"quick": 512, "small": 2048, "full": 4096}  # of the whole sequence
ALGORITHMS: dict[str, Callable[..., Any]] = {
    "ring": partial(functional.ring_attention, group=None),
    "all_gather": partial(functional.all_gather_attention, group=None),
    "all_to_all": partial(functional.all_to_all_attention, group=None),
}
DEVICES = ("cpu",)  # memory is counted from the profiler's record of the CPU's allocator
# lengths of packed documents, in 32nds of the sequence
DOCUMENTS = (1, 8, 2, 6, 4, 7, 1, 3)

COLUMNS = [
    Column("op", "op", width=23),
    Column("layout", "layout", width=10),
    Column("mask", "mask", width=11),
    Column("pass", "passes", width=7),
    Column("S", "tokens", "{}", 6),
    Column("heads", "heads", "{}", 5),
    Column("dtype", "dtype"),
    Column("us", "fused_us", "{:.0f}", 8),
    Column("p95", "p95_us", "{:.0f}", 8),
    Column("one process", "baseline_us", "{:.0f}", 11),
    Column("x it", "speedup", "{:.2f}", 5),
    Column("x ideal", "ideal_ratio", "{:.3f}", 7),
    Column("max/mean", "imbalance", "{:.2f}", 8),
    Column("KV moved MB", "moved_mb", "{:.2f}", 11),
    Column("peak MB", "peak_mb", "{:.1f}", 8),
    Column("allowed", "allowed_mb", "{:.1f}", 8),
]


@dataclass(frozen=True)
class Problem:
    """The whole sequence: q [1, heads, S, D], k, v [1, kv_heads, S, D], causal, packed or not."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    packed: bool

    @property
    def documents(self) -> tuple[int, ...] | None:
        """Ends of the documents."""
        if not self.packed:
            return None
        return tuple(itertools.accumulate((0, *(self.tokens // 32 * size for size in DOCUMENTS))))

    def draw(self) -> list[Tensor]:
        """q, k, v and the gradient of the output, the same on every rank."""
        generator = torch.Generator().manual_seed(0)
        sizes = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return [
            torch.randn(1, h, self.tokens, self.head_dim, generator=generator).to(self.dtype) for h in sizes
        ]


@dataclass(frozen=True)
class AttentionCase:
    """One algorithm and layout on one problem."""

    algorithm: str
    layout: str
    problem: Problem
    world_size: int

    @property
    def name(self) -> str:
        """For the progress bar."""
        return f"{self.algorithm} {self.layout} {self.mask}"

    @property
    def mask(self) -> str:
        """causal, or causal within documents."""
        return "8 documents" if self.problem.packed else "causal"

    @property
    def memory_bytes(self) -> int:
        """The whole sequence, its gradients and those of the oracle, a rank's share of them."""
        p = self.problem
        return 12 * (2 * p.heads + 2 * p.kv_heads) * p.tokens * p.head_dim * max(p.dtype.itemsize, 4)

    @property
    def flops(self) -> int:
        """Forward and backward of half of the scores, on one process: that is timed too."""
        p = self.problem
        return 7 * p.heads * p.tokens**2 * p.head_dim

    def identity(self) -> dict[str, Any]:
        """Fields of Row, but for which passes."""
        dtype = str(self.problem.dtype).removeprefix("torch.")
        return {
            "op": f"{self.algorithm}_attention", "case": f"{self.layout} {self.mask}", "dtype": dtype,
            "tokens": self.problem.tokens, "heads": self.problem.heads,
        }  # fmt: skip


def cases(settings: Mapping[str, Any], world_size: int) -> list[AttentionCase]:
    """Every algorithm, layout and mask; quick: one layout each, causal, short. ValueError for heads that do not fit."""
    size = size_of(settings)
    step = 64 * world_size  # zigzag cuts a sequence, and each of its documents, into 2 parts a rank
    tokens = max(step, int(settings.get("tokens") or TOKENS[size]) // step * step)
    heads, kv_heads = int(settings["heads"]), int(settings["kv_heads"])
    if heads % kv_heads:
        raise ValueError(
            f"bench: --heads {heads} is no multiple of --kv-heads {kv_heads}; every group is as large"
        )
    names = [*ALGORITHMS, *(["hierarchical"] if world_size == 4 else [])]
    quick = size == "quick"
    return [
        AttentionCase(name, layout, Problem(tokens, heads, kv_heads, 64, dtype, packed), world_size)
        for dtype in dtypes_of(settings)
        for packed in ((False,) if quick else (False, True))
        for name in names
        for layout in (("zigzag",) if quick else LAYOUTS)
    ]


def run(settings: Mapping[str, object]) -> int:
    """On every rank; the ideal is the time of one process divided by the ranks."""
    session = Session("attention", COLUMNS, settings)
    algorithms = dict(ALGORITHMS)
    if session.world_size == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "heads"))
        algorithms["hierarchical"] = partial(functional.hierarchical_attention, mesh=mesh)
    return session.run(
        cases(settings, session.world_size), lambda case: one(session, case, algorithms[case.algorithm])
    )


def one(session: Session, case: AttentionCase, attend: Callable[..., Any]) -> None:
    """Check and time forward, and forward with backward; what a rank holds stands beside both."""
    problem, layout, size = case.problem, case.layout, session.world_size
    if case.algorithm == "all_to_all" and problem.heads < size:
        session.skip(f"{problem.heads} heads for {size} ranks: every rank needs one", **case.identity())
        return
    whole = problem.draw()
    spans = spans_of(layout, problem.tokens, size, session.rank, problem.documents)
    mine = tokens_of(spans)
    own = [t[:, :, mine].contiguous() for t in whole]
    split = partial(attend, causal=True, layout=layout, cu_seqlens=problem.documents)
    single = partial(_unsplit, documents=problem.documents)
    exact, unsplit = _both(single, [t.float() for t in whole]), _both(single, whole)
    names = ("out", "grad_q", "grad_k", "grad_v")
    for what, got, right, alone in zip(names, _both(split, own), exact, unsplit, strict=True):
        want = right[:, :, mine]
        # twice what one process is off: each rank's sums are rounded, then their sum
        allowed = 2.0 * float((alone - right).abs().max()) / float(want.abs().max())
        session.check(f"{what} of {case.name}", got, want, max(allowed, 1e-4))
    held = _held(session, case, split, single, own, whole)
    passes: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "forward": (lambda: split(*own[:3]), lambda: single(*whole[:3])),
        "both": (lambda: _both(split, own), lambda: _both(single, whole)),
    }
    for name, (fused, baseline) in passes.items():
        times = session.time({"fused": fused, "baseline": baseline})
        row = session.row(
            times,
            baseline="one process",
            extra={
                "layout": layout, "mask": case.mask, "passes": name, "kv_heads": problem.kv_heads,
                "head_dim": problem.head_dim, "ideal_ratio": times.ratio("fused", "baseline") * size, **held,
            },
            **{**case.identity(), "case": f"{case.layout} {case.mask} {name}"},
        )  # fmt: skip
        session.add(row)


def _held(
    session: Session,
    case: AttentionCase,
    split: Callable[..., Tensor],
    single: Callable[..., Tensor],
    own: list[Tensor],
    whole: list[Tensor],
) -> dict[str, float | None]:
    """Balance of the work, what moves, memory of a rank and what it may take, MB."""
    p, size = case.problem, session.world_size
    work = work_of(case.layout, p.tokens, size, cu_seqlens=p.documents)
    block = 2 * p.kv_heads * p.tokens // size * p.head_dim * p.dtype.itemsize
    peak = peak_bytes(lambda: _both(split, own)) + window_bytes(session.group.name)
    alone = peak_bytes(lambda: _both(single, whole))
    exchanged = case.algorithm in ("all_to_all", "hierarchical")
    return {
        "imbalance": 1.0 if case.algorithm == "all_to_all" else work.imbalance,
        "moved_mb": None if exchanged else work.kv_bytes(p.kv_heads, p.head_dim, p.dtype.itemsize) / 1e6,
        "peak_mb": peak / 1e6,
        "allowed_mb": (alone / size + 2 * block) / 1e6,
    }


def readme(report: Report) -> str:
    """A line per algorithm, layout, mask and dtype: both passes against the ideal, balance, memory."""
    pairs: dict[tuple[str, str, str, str], dict[str, Row]] = {}
    for row in report.rows:
        key = (row.op.removesuffix("_attention"), row.value("layout"), row.value("mask"), short(row.dtype))
        pairs.setdefault(key, {})[row.value("passes")] = row
    head = [
        "algorithm",
        "layout",
        "mask",
        "dtype",
        "forward x ideal",
        "with backward",
        "max/mean",
        "MB (allowed)",
    ]
    lines = []
    for key, found in pairs.items():
        forward, both = found.get("forward"), found.get("both")
        if forward is None or both is None:  # skipped, or interrupted between the two
            continue
        numbers = [f"{row.value('ideal_ratio'):.2f}" for row in (forward, both)]
        held = f"{both.value('peak_mb'):.1f} ({both.value('allowed_mb'):.1f})"
        lines.append([*key, *numbers, f"{both.value('imbalance'):.2f}", held])
    return table(head, lines, left=4)


def _unsplit(q: Tensor, k: Tensor, v: Tensor, documents: tuple[int, ...] | None) -> Tensor:
    """torch's attention on one process, document by document."""
    attend = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    if documents is None:
        return attend(q, k, v)
    parts = [attend(q[:, :, b:e], k[:, :, b:e], v[:, :, b:e]) for b, e in itertools.pairwise(documents)]
    return torch.cat(parts, 2)


def _both(attend: Callable[..., Tensor], tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """Forward and backward: out, gradients of q, k, v."""
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in tensors[:3]]
        out = attend(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, tensors[3])
