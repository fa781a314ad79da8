"""The private device ops, called for all virtual ranks at once: lists by rank in, lists by rank out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from interlace.device import VirtualRanks, Workspace

OPS = torch.ops.interlace
POISON = float("nan")


@dataclass(frozen=True)
class Options:
    """How a GEMM is launched; the defaults are what the op would do by itself."""

    tile_columns: int = 128
    comm_blocks: int = 2
    blocks: int = 0
    mainloop: int = 0
    float32_wire: bool = False


@dataclass(frozen=True)
class Behind:
    """What follows a reduction; one entry a rank, or None."""

    bias: Tensor | None = None
    residuals: Sequence[Tensor | None] | None = None
    norm_weight: Tensor | None = None
    eps: float = 1e-5
    norm: bool = False


@dataclass
class Group:
    """Virtual ranks, and the machine they are on: "cuda", or "cpu" in a rehearsal."""

    world_size: int
    half_bytes: int
    device: str
    timeout: float = 20.0

    def __post_init__(self) -> None:
        self.ranks = VirtualRanks(
            self.world_size, self.half_bytes, timeout=self.timeout, memory_device=self.device
        )

    def each(self, launch: Callable[[Workspace], None]) -> None:
        """Launch once for each rank, on its stream; the current stream waits for all."""
        with self.ranks.ranks() as workspaces:
            for workspace in workspaces:
                launch(workspace)

    def synchronize(self) -> None:
        """Wait for all ranks and raise what their kernels recorded."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.ranks.check()

    def room_for(self, half_bytes: int) -> None:
        """Make the halves at least this large."""
        if half_bytes > self.ranks.workspace.half_bytes:
            self.synchronize()
            self.half_bytes = half_bytes
            self.__post_init__()


def poisoned(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of NaN: what a kernel does not write is found."""
    return torch.full(shape, POISON, dtype=dtype or like.dtype, device=like.device)


def out_dtype(x: Tensor) -> torch.dtype:
    """What products of x are stored as."""
    return torch.bfloat16 if x.dtype == torch.float8_e4m3fn else x.dtype


def gemm(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    options: Options,
    *,
    summed: bool = False,
    residual: Tensor | None = None,
    x_scale: Tensor | None = None,
    weight_scales: Sequence[Tensor] = (),
) -> list[Tensor]:
    """The plain product: one out for each weight, or the sum of all products."""
    rows, dtype = xs[0].shape[0], out_dtype(xs[0])
    outs = [poisoned(xs[0], rows, w.shape[0], dtype=dtype) for w in (weights[:1] if summed else weights)]
    OPS._device_gemm(
        list(xs),
        list(weights),
        list(biases),
        residual,
        x_scale,
        list(weight_scales),
        outs,
        summed,
        options.tile_columns,
        options.blocks,
        options.mainloop,
    )
    return outs


def all_gather_gemm(
    group: Group,
    xs: Sequence[Tensor],
    weights: Sequence[Sequence[Tensor]],
    biases: Sequence[Sequence[Tensor | None]],
    options: Options,
    *,
    x_scales: Sequence[Tensor] | None = None,
    weight_scales: Sequence[Sequence[Tensor]] | None = None,
    gathered: bool = True,
) -> tuple[list[Tensor | None], list[list[Tensor]]]:
    """x of every rank, weights of every rank -> gathered x and outs of every rank."""
    rows = [x.shape[0] for x in xs]
    total, depth = sum(rows), xs[0].shape[1]
    group.room_for(OPS._device_half_bytes_all_gather_gemm(rows, depth, xs[0].element_size()))
    wholes = [torch.empty(total, depth, dtype=x.dtype, device=x.device) if gathered else None for x in xs]
    outs = [
        [poisoned(xs[0], total, w.shape[0], dtype=out_dtype(xs[0])) for w in of_rank] for of_rank in weights
    ]

    def launch(workspace: Workspace) -> None:
        rank = workspace.rank
        OPS._device_all_gather_gemm(
            xs[rank],
            list(weights[rank]),
            list(biases[rank]),
            None if x_scales is None else x_scales[rank],
            [] if weight_scales is None else list(weight_scales[rank]),
            wholes[rank],
            outs[rank],
            rows,
            *workspace.tail,
            options.tile_columns,
            options.blocks,
            options.comm_blocks,
            options.mainloop,
        )

    group.each(launch)
    return wholes, outs


def gemm_reduce(
    group: Group,
    xs: Sequence[Sequence[Tensor]],
    weights: Sequence[Sequence[Tensor]],
    rows: Sequence[int] | None,
    behind: Behind,
    options: Options,
    *,
    x_scales: Sequence[Tensor] | None = None,
    weight_scales: Sequence[Sequence[Tensor]] | None = None,
) -> tuple[list[Tensor], list[Tensor | None]]:
    """xs and weights of every rank -> sums and, with a norm, normalised rows. rows: of every rank; None: all-reduce."""
    first, columns = xs[0][0], weights[0][0].shape[0]
    dtype = out_dtype(first)
    of_rank = [first.shape[0]] * group.world_size if rows is None else list(rows)
    group.room_for(
        OPS._device_half_bytes_gemm_reduce(
            [first.shape[0]] if rows is None else list(rows),
            group.world_size,
            rows is not None,
            columns,
            dtype.itemsize,
            options.float32_wire,
            False,
        )
    )
    outs = [poisoned(first, count, columns, dtype=dtype) for count in of_rank]
    normalised = [poisoned(first, count, columns, dtype=dtype) if behind.norm else None for count in of_rank]
    op = OPS._device_gemm_all_reduce if rows is None else OPS._device_gemm_reduce_scatter

    def launch(workspace: Workspace) -> None:
        rank = workspace.rank
        op(
            list(xs[rank]),
            list(weights[rank]),
            behind.bias,
            None if behind.residuals is None else behind.residuals[rank],
            behind.norm_weight,
            behind.eps,
            None if x_scales is None else x_scales[rank],
            [] if weight_scales is None else list(weight_scales[rank]),
            outs[rank],
            normalised[rank],
            *([] if rows is None else [list(rows)]),
            options.float32_wire,
            False,
            *workspace.tail,
            options.tile_columns,
            options.blocks,
            options.comm_blocks,
            options.mainloop,
        )

    group.each(launch)
    return outs, normalised


def all_reduce(group: Group, xs: Sequence[Tensor], algorithm: str, blocks: int) -> list[Tensor]:
    """Sums of xs, by `algorithm` one_shot or two_shot."""
    count, size = xs[0].numel(), xs[0].element_size()
    if algorithm == "one_shot":
        group.room_for(OPS._device_half_bytes_one_shot(1, count, size))
    else:
        group.room_for(OPS._device_half_bytes_two_shot(1, count, size, group.world_size))
    outs = [torch.full_like(x, POISON) for x in xs]
    op = getattr(OPS, f"_device_{algorithm}_all_reduce")
    group.each(lambda w: op([xs[w.rank]], [outs[w.rank]], *w.tail, blocks))
    return outs


def reduce_norm(
    group: Group,
    xs: Sequence[Tensor],
    rows: Sequence[int] | None,
    behind: Behind,
    algorithm: str,
    blocks: int,
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Sums of xs + bias + residual and their norm: one_shot, two_shot, or reduce_scatter with rows of every rank."""
    count, columns, size = xs[0].shape[0], xs[0].shape[1], xs[0].element_size()
    if rows is not None:
        group.room_for(OPS._device_half_bytes_slots(max(rows), columns, size, group.world_size))
    elif algorithm == "one_shot":
        group.room_for(OPS._device_half_bytes_one_shot(count, columns, size))
    else:
        group.room_for(OPS._device_half_bytes_two_shot(count, columns, size, group.world_size))
    of_rank = [count] * group.world_size if rows is None else list(rows)
    sums = [poisoned(xs[0], n, columns) for n in of_rank]
    outs = [poisoned(xs[0], n, columns) if behind.norm else None for n in of_rank]
    name = "reduce_scatter_norm" if rows is not None else f"{algorithm}_all_reduce_norm"
    op = getattr(OPS, f"_device_{name}")

    def launch(workspace: Workspace) -> None:
        rank = workspace.rank
        residual = None if behind.residuals is None else behind.residuals[rank]
        op(
            xs[rank],
            behind.bias,
            residual,
            behind.norm_weight,
            behind.eps,
            sums[rank],
            outs[rank],
            *([] if rows is None else [list(rows)]),
            *workspace.tail,
            blocks,
        )

    group.each(launch)
    return sums, outs


def reduce_scatter(group: Group, xs: Sequence[Tensor], rows: Sequence[int], blocks: int) -> list[Tensor]:
    """This rank's rows of the sum of xs, for every rank."""
    columns = xs[0].shape[1]
    group.room_for(OPS._device_half_bytes_slots(max(rows), columns, xs[0].element_size(), group.world_size))
    outs = [poisoned(xs[0], count, columns) for count in rows]
    group.each(lambda w: OPS._device_reduce_scatter(xs[w.rank], outs[w.rank], list(rows), *w.tail, blocks))
    return outs


def all_gather(group: Group, xs: Sequence[Tensor], blocks: int) -> list[Tensor]:
    """Rows of all ranks, for every rank. blocks=0: by the copy engines."""
    rows, columns = [x.shape[0] for x in xs], xs[0].shape[1]
    if blocks == 0:
        group.room_for(OPS._device_half_bytes_all_gather_gemm(rows, columns, xs[0].element_size()))
    else:
        group.room_for(
            OPS._device_half_bytes_slots(max(rows), columns, xs[0].element_size(), group.world_size)
        )
    outs = [poisoned(xs[0], sum(rows), columns) for _ in xs]

    def launch(workspace: Workspace) -> None:
        rank = workspace.rank
        if blocks == 0:
            OPS._device_copy_engine_all_gather(xs[rank], outs[rank], rows, *workspace.tail)
        else:
            OPS._device_all_gather(xs[rank], outs[rank], rows, *workspace.tail, blocks)

    group.each(launch)
    return outs


def all_to_all(
    group: Group, xs: Sequence[Tensor], rows: Sequence[Sequence[int]], blocks: int
) -> list[Tensor]:
    """rows[s][r]: rows that rank s sends to rank r."""
    columns, largest = xs[0].shape[1], max(max(of_rank) for of_rank in rows)
    group.room_for(OPS._device_half_bytes_slots(largest, columns, xs[0].element_size(), group.world_size))
    received = [[of_rank[r] for of_rank in rows] for r in range(group.world_size)]
    outs = [poisoned(xs[0], sum(counts), columns) for counts in received]

    def launch(workspace: Workspace) -> None:
        rank = workspace.rank
        sent = list(rows[rank])
        OPS._device_all_to_all(xs[rank], outs[rank], sent, received[rank], largest, *workspace.tail, blocks)

    group.each(launch)
    return outs


def barrier(group: Group, first_rank: int = 0, ranks: int | None = None) -> None:
    """One launch of the barrier that plays ranks first_rank, first_rank + 1, ..."""
    count = group.world_size if ranks is None else ranks
    for workspace in group.ranks.workspaces[first_rank : first_rank + count]:
        stream = group.ranks.streams[workspace.rank]
        with torch.cuda.stream(stream):
            OPS._device_barrier(*workspace.tail, 1, workspace.device)
