"""From an op's arguments to a Problem, and from the Problem to the way the call goes."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import reference
from ..groups import GroupInfo, resolve
from ..heuristics import Decision, Problem
from ..paths import chosen_backend, note_path
from .launches import Place
from .state import known, state_of

__all__ = ["OURS", "decide", "foreseen", "place_of", "shard_sizes"]

OURS = ("fused", "one_shot", "two_shot")
_DEMANDS = {"auto": "", "fused": "ours", "reference": "baseline", "decomposed": "decomposed"}


def place_of(group_name: str) -> Place:
    info: GroupInfo = resolve(group_name)
    return Place(info.name, info.rank, info.world_size)


def shard_sizes(op: str, local: int, place: Place, on: torch.device, total: int | None) -> list[int]:
    """Length of every rank's shard. Without the total the ranks tell each other, which makes the host wait."""
    if place.world_size == 1:
        return [local]
    if total is None and on.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"{op}: lengths of the shards cannot be exchanged while a CUDA graph is captured; pass the total length "
            "(gather_size), cut as torch.chunk does"
        )
    return reference.gather_sizes(local, place.group_name, on, total)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def decide(
    op: str,
    x: Tensor,
    place: Place,
    *,
    rows: int,
    width: int,
    dim_leads: bool = True,
    products: int = 1,
    out_dtype: torch.dtype | None = None,
) -> Decision:
    """Which way the call goes; noted, so that last_path() and INTERLACE_PRINT_CONFIG tell it."""
    demand = _DEMANDS[chosen_backend()]
    if place.world_size == 1:
        decision = Decision("baseline", "one rank: there is nothing to communicate")
    else:
        state = state_of(op, place.group_name, x.device)
        problem = Problem(
            op=op,
            dtype=_name(x.dtype),
            rows=rows,
            width=width,
            world_size=place.world_size,
            products=products,
            dim_leads=dim_leads,
            largest_dim=max(rows, width),
            unavailable=state.unavailable,
            itemsize=x.element_size(),
            out_dtype="" if out_dtype is None else _name(out_dtype),
        )
        if demand == "decomposed" and "gemm" not in op:
            demand = ""  # these have no pieces
        decision = state.choose(problem, demand)
    note_path(op, decision.algorithm, decision.reason, decision.algorithm in OURS)
    return decision


def foreseen(
    op: str, group_name: str, world_size: int, dtype: torch.dtype, rows: int, width: int = 8192
) -> Decision | None:
    """What a call with these sizes would take; None before the group's first call on CUDA tensors. For reports."""
    state = known(group_name)
    if state is None:
        return None
    problem = Problem(
        op, _name(dtype), rows, width, world_size, unavailable=state.unavailable, itemsize=dtype.itemsize
    )
    return state.choose(problem, "")
