"""The choice: legal candidates, then the tuned table, then crossovers."""

from __future__ import annotations

from ..hardware import Hardware
from .candidates import legal
from .problem import GATHERS, PLAIN, Decision, Launch, Problem
from .tuned import Crossovers, Table

__all__ = ["choose"]


def choose(problem: Problem, hardware: Hardware, table: Table, demand: str = "") -> Decision:
    """The algorithm of a call, the same on every rank that passes equal arguments.

    demand: an algorithm the caller insists on ("" for none); "ours" stands for any kernel of this package. Raises
    ValueError with the reasons when the demanded algorithm cannot serve the call.
    """
    candidates, rejected = legal(problem, hardware)
    if demand == "ours":
        candidates = tuple(c for c in candidates if c in ("fused", "one_shot", "two_shot"))
    elif demand:
        candidates = tuple(c for c in candidates if c == demand)
    if not candidates:
        reasons = "; ".join(f"{name}: {why}" for name, why in rejected if demand in ("ours", name))
        raise ValueError(f"{problem.op}: no kernel of ours can serve this call ({reasons})")
    launch = default_launch(problem, hardware)
    entry = table.find(problem, hardware)
    if entry is not None and entry.algorithm in candidates:
        return Decision(entry.algorithm, f"tuned: {entry.origin}", entry.launch or launch, rejected)
    crossovers = table.crossovers_of(hardware)
    algorithm, reason = _by_crossover(problem, hardware, crossovers, candidates)
    if demand and demand != "ours":
        reason = f'interlace.backend("{demand}")'
    return Decision(algorithm, reason, launch, rejected)


def default_launch(problem: Problem, hardware: Hardware) -> Launch:
    """Tile and blocks for a first guess."""
    wide = hardware.mainloop == "sm_90a" and problem.dtype == "bfloat16" and problem.op not in GATHERS
    # a tile of 256 columns needs as many columns, and enough tiles that every multiprocessor has one
    tiles = -(-problem.rows // 128) * (problem.width // 256)
    tile_columns = 256 if wide and problem.width >= 256 and tiles >= hardware.multiprocessors else 128
    # blocks that copy: eight saturate NVLink of this generation when each moves 16 bytes a thread; PCIe needs fewer
    comm_blocks = min(8 if hardware.link == "nvlink" else 2, max(1, hardware.multiprocessors // 8))
    return Launch(tile_columns=tile_columns, comm_blocks=comm_blocks)


def _by_crossover(
    problem: Problem, hardware: Hardware, crossovers: Crossovers, candidates: tuple[str, ...]
) -> tuple[str, str]:
    if problem.op in PLAIN:
        preferred = _plain(problem, crossovers)
    elif problem.op.startswith(("gemm_all_reduce", "sum_gemm_all_reduce")):
        preferred = _all_reduce(problem, hardware, crossovers)
    else:
        preferred = _gather_or_scatter(problem, crossovers)
    for algorithm, reason in preferred:
        if algorithm in candidates:
            return algorithm, reason
    return candidates[-1], "nothing faster can serve the call"


def _gather_or_scatter(problem: Problem, crossovers: Crossovers) -> list[tuple[str, str]]:
    """Overlap pays when each rank has enough to multiply; a shard of few rows is not worth its signals."""
    rows_enough = problem.rows >= crossovers.overlap_rows_per_rank * problem.world_size
    work_enough = problem.rows * problem.width >= crossovers.overlap_elements_per_rank * problem.world_size
    if rows_enough and work_enough:
        reason = "many rows: the collective hides under the product"
        return [
            ("fused", reason),
            ("decomposed", f"{reason}, in pieces"),
            ("baseline", "no overlap possible"),
        ]
    if problem.message_bytes <= crossovers.one_shot_bytes:
        return [
            ("one_shot", "few rows: one kernel of ours for the collective, then the library's product"),
            ("baseline", "few rows: there is too little to overlap"),
        ]
    return [("baseline", "the product is too short to hide the collective")]


def _all_reduce(problem: Problem, hardware: Hardware, crossovers: Crossovers) -> list[tuple[str, str]]:
    rows = (
        crossovers.all_reduce_rows_multicast if hardware.multicast else crossovers.all_reduce_rows_peer_stores
    )
    if problem.rows >= rows:
        reason = "many rows: tiles are reduced while others are multiplied"
        preferred = [("fused", reason)]
        if problem.rows >= crossovers.overlap_rows_per_rank * problem.world_size:
            preferred.append(("decomposed", f"{reason}, in pieces"))
    elif problem.message_bytes <= crossovers.one_shot_bytes:
        preferred = [("one_shot", "few rows: every rank reads every rank, one signal")]
    else:
        preferred = [("two_shot", "every rank sums a part, then all read the sums")]
    if problem.message_bytes <= crossovers.two_shot_bytes:
        preferred.append(("two_shot", "every rank sums a part, then all read the sums"))
    return [*preferred, ("baseline", "no kernel of ours is faster here")]


def _plain(problem: Problem, crossovers: Crossovers) -> list[tuple[str, str]]:
    if problem.message_bytes <= crossovers.one_shot_bytes:
        return [("one_shot", "small: one kernel, one signal"), ("baseline", "small")]
    if problem.message_bytes <= crossovers.two_shot_bytes:
        reason = "medium: every rank sums a part, then all read the sums"
        return [("two_shot", reason), ("one_shot", "medium: one kernel, one step"), ("baseline", "medium")]
    return [("baseline", "large: torch.distributed reaches the full bandwidth")]
