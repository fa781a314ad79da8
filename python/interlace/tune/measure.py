"""Times one candidate after another through the ops' own kernels, and picks the fastest for the table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from .. import reference
from ..cuda_dispatch import KERNELS, GroupState
from ..groups import GroupInfo
from ..heuristics import Entry, Table, merged
from ..heuristics.problem import GATHERS, NORMS, SCALED
from .cases import Candidate, Case, candidates, problem_of

__all__ = ["call_of", "fastest", "microseconds", "tuned_entry"]

MARGIN = 0.02  # baseline stays unless something is faster by more than what two runs differ
EPS = 1e-6


def call_of(case: Case, cut: int, info: GroupInfo, device: torch.device) -> Callable[[], Any]:
    """One call of the op, with inputs of its own. cut: N of a gather's weight, K of a reduction's, per rank."""
    dtype = torch.bfloat16 if case.op in SCALED else case.dtype

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.float32).to(dtype)

    begin, end = reference.chunk_range(case.rows, info.world_size, info.rank)
    if case.op in GATHERS:
        x, weight = make(end - begin, case.width), make(cut, case.width)
    else:
        x, weight = make(case.rows, cut), make(case.width, cut)
    kernel = KERNELS[case.op]
    if case.op in SCALED:
        scales = (torch.ones(1, device=device), torch.ones(1, device=device))
        x, weight = x.to(case.dtype), weight.to(case.dtype)
        if case.op in GATHERS:
            return lambda: kernel(x, scales[0], [weight], [scales[1]], [None], dtype, 0, info.name, case.rows)
        return lambda: kernel(x, scales[0], weight, scales[1], None, dtype, 0, info.name)
    if case.op in GATHERS:
        return lambda: kernel(x, [weight], [None], 0, info.name, False, case.rows)
    if case.op in NORMS:
        kept = end - begin if "scatter" in case.op else case.rows
        residual, norm_weight = make(kept, case.width), make(case.width)
        tail = (0, info.name) if "scatter" in case.op else (info.name,)
        return lambda: kernel(x, weight, None, residual, norm_weight, EPS, *tail)
    return lambda: kernel(x, weight, None, *((0,) if "scatter" in case.op else ()), info.name)


def microseconds(call: Callable[[], Any], group_name: str, device: torch.device, repeats: int) -> float:
    """Median time of a call, that of the slowest rank: every rank returns the same number. Collective."""
    for _ in range(2):
        call()
    times = [_once(call, device) for _ in range(repeats)]
    mine = torch.tensor([statistics.median(times)], device=device, dtype=torch.float64)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=_resolve_process_group(group_name))
    return mine.item()


def _once(call: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3
    begin_seconds = time.perf_counter()
    call()
    return (time.perf_counter() - begin_seconds) * 1e6


def fastest(times: dict[Candidate, float]) -> Candidate:
    """The candidate to take: the fastest, but baseline when nothing is faster by more than MARGIN."""
    best = min(times, key=lambda c: times[c])
    baseline = next((c for c in times if c.algorithm == "baseline"), None)
    if baseline is not None and times[best] >= times[baseline] * (1 - MARGIN):
        return baseline
    return best


def tuned_entry(
    case: Case,
    info: GroupInfo,
    state: GroupState,
    device: torch.device,
    *,
    repeats: int,
    origin: str,
    only: Iterable[str] = (),
) -> tuple[Entry, dict[Candidate, float]]:
    """Times every candidate of a case. Collective: all ranks time the same ones in the same order.

    Each candidate is made the table's answer for the moment, so that what is timed is the op as it will run, the
    decision included. only: algorithms to leave out the others. The table is put back.
    """
    problem = problem_of(case, info.world_size, state.unavailable)
    table, wanted = state.table, set(only)
    calls = [call_of(case, cut, info, device) for cut in case.cuts]
    times: dict[Candidate, float] = {}
    try:
        for candidate in candidates(problem, state.hardware):
            if wanted and candidate.algorithm not in wanted:
                continue
            entry = _entry(case, info, state, candidate, {}, origin)
            state.table = merged(table, Table({}, {entry.key: entry}))
            state.decisions.clear()
            times[candidate] = sum(microseconds(call, info.name, device, repeats) for call in calls)
    finally:
        state.table = table
        state.decisions.clear()
    named = {candidate.name: round(value, 2) for candidate, value in times.items()}
    return _entry(case, info, state, fastest(times), named, origin), times


def _entry(
    case: Case,
    info: GroupInfo,
    state: GroupState,
    candidate: Candidate,
    times: dict[str, float],
    origin: str,
) -> Entry:
    return Entry(
        gpu=state.hardware.name,
        world_size=info.world_size,
        dtype=str(case.dtype).removeprefix("torch."),
        op=case.op,
        rows=case.rows,
        width=case.width,
        algorithm=candidate.algorithm,
        launch=candidate.launch,
        microseconds=times,
        origin=origin,
    )
