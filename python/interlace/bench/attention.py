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
from .harness import Column, Session
from .peak import peak_bytes

__all__ = ["run"]

ALGORITHMS: dict[str, Callable[..., Any]] = {
    "ring": partial(functional.ring_attention, group=None),
    "all_gather": partial(functional.all_gather_attention, group=None),
    "all_to_all": partial(functional.all_to_all_attention, group=None),
}
# lengths of packed documents, in 32nds of the sequence
DOCUMENTS = (1, 8, 2, 6, 4, 7, 1, 3)

COLUMNS = [
    Column("algorithm", "algorithm", width=12),
    Column("layout", "layout", width=10),
    Column("mask", "mask", width=11),
    Column("S", "tokens", width=6),
    Column("dtype", "dtype"),
    Column("fwd ms", "forward_ms", "{:.1f}", 8),
    Column("x ideal", "forward_ratio", "{:.3f}", 8),
    Column("+bwd ms", "both_ms", "{:.1f}", 8),
    Column("x ideal", "both_ratio", "{:.3f}", 8),
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


def run(settings: Mapping[str, object]) -> int:
    """Every algorithm, layout and mask; the ideal is the time of one process divided by the ranks."""
    session = Session("attention", COLUMNS, settings)
    tokens = 1024 if session.quick else int(str(settings["tokens"]))
    algorithms = dict(ALGORITHMS)
    if session.world_size == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "heads"))
        algorithms["2-D"] = partial(functional.hierarchical_attention, mesh=mesh)
    for dtype, packed in itertools.product(session.dtypes, (False, True)):
        problem = Problem(
            tokens, int(str(settings["heads"])), int(str(settings["kv_heads"])), 64, dtype, packed
        )
        for (name, attend), layout in itertools.product(algorithms.items(), LAYOUTS):
            if session.quick and layout == "striped":
                continue
            _one(session, problem, name, attend, layout)
    return session.finish()


def _one(session: Session, problem: Problem, name: str, attend: Callable[..., Any], layout: str) -> None:
    whole = problem.draw()
    spans = spans_of(layout, problem.tokens, session.world_size, session.rank, problem.documents)
    mine = tokens_of(spans)
    own = [t[:, :, mine].contiguous() for t in whole]
    split = partial(attend, causal=True, layout=layout, cu_seqlens=problem.documents)
    single = partial(_unsplit, documents=problem.documents)
    exact = [t[:, :, mine] for t in _both(single, whole)]
    for what, got, want in zip(("out", "grad_q", "grad_k", "grad_v"), _both(split, own), exact, strict=True):
        session.check(
            f"{what} of {name} {layout}", got, want, limit=2e-2 if problem.dtype != torch.float32 else 1e-4
        )
    times = session.time(
        {
            "forward": lambda: split(*own[:3]),
            "single": lambda: single(*whole[:3]),
            "both": lambda: _both(split, own),
            "single both": lambda: _both(single, whole),
        }
    )
    size, item = session.world_size, problem.dtype.itemsize
    work = work_of(layout, problem.tokens, size, cu_seqlens=problem.documents)
    block = 2 * problem.kv_heads * problem.tokens // size * problem.head_dim * item
    peak = peak_bytes(lambda: _both(split, own)) + window_bytes(session.group.name)
    alone = peak_bytes(lambda: _both(single, whole))
    moved = work.kv_bytes(problem.kv_heads, problem.head_dim, item)
    session.add(
        algorithm=name, layout=layout, mask="8 documents" if problem.packed else "causal", tokens=problem.tokens,
        heads=problem.heads, kv_heads=problem.kv_heads, head_dim=problem.head_dim, world_size=size,
        dtype=str(problem.dtype).removeprefix("torch."), forward_ms=times.summary("forward").median * 1e3,
        forward_ratio=times.ratio("forward", "single") * size, both_ms=times.summary("both").median * 1e3,
        both_ratio=times.ratio("both", "single both") * size,
        imbalance=1.0 if name == "all_to_all" else work.imbalance,
        moved_mb=None if name in ("all_to_all", "2-D") else moved / 1e6, peak_mb=peak / 1e6,
        allowed_mb=(alone / size + 2 * block) / 1e6,
    )  # fmt: skip


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
