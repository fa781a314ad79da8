"""The linears of an 8-layer decoder: o, gate and up, down; hidden 1024, feed-forward 2816, 16 all-reduces.

Layers run back to back, as in a model: no barrier inside. single: one process with the cores of all ranks and
whole weights. engine: compute only / (F.linear without communication). comm: fused / compute only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import interlace
from interlace import functional
from interlace.bench import whole_machine
from interlace.bench.harness import Column, Session, command, packed, relative_error
from interlace.reference import chunk_range

HIDDEN, INNER, LAYERS = 1024, 2816, 8
ROWS = (1, 4, 16, 128, 512)
QUICK_ROWS = (1, 128)

COLUMNS = [
    Column("dtype", "dtype"),
    Column("M", "rows", width=5),
    Column("fused ms", "ms", "{:.2f}"),
    Column("p95", "p95_ms", "{:.2f}"),
    Column("compute", "compute_ms", "{:.2f}"),
    Column("F.linear", "linear_ms", "{:.2f}"),
    Column("gloo", "gloo_ms", "{:.2f}"),
    Column("single", "single_ms", "{:.2f}"),
    Column("engine", "engine", "{:.3f}"),
    Column("comm", "communication", "{:.3f}"),
    Column("exposed", "exposed_ms", "{:.3f}"),
    Column("unfused", "unfused", "{:.3f}"),
    Column("reference", "reference", "{:.2f}"),
    Column("x gloo", "gloo", "{:.2f}"),
]

Product = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Layer:
    """out [HIDDEN, HIDDEN], gate_up [2 INNER, HIDDEN], down [HIDDEN, INNER]: whole, or this rank's shard."""

    out: Tensor
    gate_up: Tensor
    down: Tensor

    def shard(self, rank: int, world_size: int) -> Layer:
        head = slice(*chunk_range(HIDDEN, world_size, rank))
        inner = slice(*chunk_range(INNER, world_size, rank))
        gate_up = torch.cat([half[inner] for half in self.gate_up.chunk(2)])
        return Layer(self.out[:, head].contiguous(), gate_up, self.down[:, inner].contiguous())

    def map(self, change: Callable[[Tensor], Tensor]) -> Layer:
        return Layer(change(self.out), change(self.gate_up), change(self.down))


def step(layers: list[Layer], x: Tensor, heads: slice, column: Product, row: Product) -> Tensor:
    """x [M, HIDDEN] through all layers; `row` ends with the sum over ranks, if there is one."""
    for layer in layers:
        y = x + row(x[:, heads], layer.out)
        gate, up = column(y, layer.gate_up).chunk(2, -1)
        x = y + row(F.silu(gate) * up, layer.down)
    return x


def variants_of(
    session: Session, whole: list[Layer], shards: list[Layer], frozen: list[Layer], x: Tensor
) -> dict[str, Callable[[], Tensor | None]]:
    """What is timed; `frozen` are the shards as the engine has them. `single` runs on rank 0, the others wait."""
    group = session.group.name
    heads = slice(*chunk_range(HIDDEN, session.world_size, session.rank))

    def local(x: Tensor, w: Tensor) -> Tensor:
        return functional.column_linear(x, w, group=group)

    def with_gloo(x: Tensor, w: Tensor) -> Tensor:
        out = F.linear(x, w)
        dist.all_reduce(out)
        return out

    def unfused(x: Tensor, w: Tensor) -> Tensor:
        return functional.all_reduce(local(x, w), group=group)

    def fused(x: Tensor, w: Tensor) -> Tensor:
        return functional.linear_all_reduce(x, w, group=group)

    def reference() -> Tensor:
        with interlace.backend("reference"):
            return step(shards, x, heads, local, fused)

    def single() -> Tensor | None:
        if session.rank != 0:
            return None
        with whole_machine(session.placement):
            return step(whole, x, slice(None), F.linear, F.linear)

    return {
        "linear": lambda: step(shards, x, heads, F.linear, F.linear),
        "gloo": lambda: step(shards, x, heads, F.linear, with_gloo),
        "reference": reference,
        "fused": lambda: step(frozen, x, heads, local, fused),
        "unfused": lambda: step(frozen, x, heads, local, unfused),
        "compute": lambda: step(frozen, x, heads, local, local),
        "single": single,
    }


def one(session: Session, whole: list[Layer], rows: int, dtype: torch.dtype) -> None:
    """Check and time one number of rows."""
    x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
    shards = [layer.shard(session.rank, session.world_size) for layer in whole]
    frozen = [layer.map(lambda weight: packed(weight, session.settings)) for layer in shards]
    exact = [layer.map(Tensor.float) for layer in whole]
    want = step(exact, x.float(), slice(None), F.linear, F.linear)
    # sixteen roundings of the residual stream: the unsplit model in this dtype says what they cost
    yardstick = relative_error(step(whole, x, slice(None), F.linear, F.linear), want)
    variants = variants_of(session, whole, shards, frozen, x)
    for name in ("fused", "unfused", "gloo", "reference"):
        got = variants[name]()
        session.check(f"block {dtype} M={rows} {name}", got, want, limit=2 * yardstick)
    t = session.time(variants, budget_seconds=6.0)
    mine = t.summary("fused")
    session.add(
        dtype=str(dtype).removeprefix("torch."),
        rows=rows,
        ms=mine.median * 1e3,
        p95_ms=mine.p95 * 1e3,
        compute_ms=t.summary("compute").median * 1e3,
        linear_ms=t.summary("linear").median * 1e3,
        gloo_ms=t.summary("gloo").median * 1e3,
        gloo_p20_ms=t.summary("gloo").p20 * 1e3,
        single_ms=t.summary("single").median * 1e3,
        engine=t.ratio("compute", "linear"),
        communication=t.ratio("fused", "compute"),
        exposed_ms=t.difference("fused", "compute") * 1e3,
        unfused=t.ratio("unfused", "fused"),
        reference=t.ratio("reference", "fused"),
        gloo=t.ratio("gloo", "fused"),
        kept=mine.kept,
        taken=mine.taken,
    )


def layers_of(dtype: torch.dtype) -> list[Layer]:
    """The whole weights, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER))
    return [
        Layer(*((torch.randn(n, k, generator=generator) * 0.02).to(dtype) for n, k in shapes))
        for _ in range(LAYERS)
    ]


def run(settings: Mapping[str, object]) -> int:
    """On every rank."""
    session = Session("block", COLUMNS, settings)
    for dtype in session.dtypes:
        whole = layers_of(dtype)
        for rows in QUICK_ROWS if session.quick else ROWS:
            one(session, whole, rows, dtype)
    return session.finish()


if __name__ == "__main__":
    command(__file__, run, __doc__)()
