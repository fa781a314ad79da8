"""Which algorithms can serve a call at all; each one that cannot has a reason that is shown to the user."""

from __future__ import annotations

from ..hardware import Hardware
from .problem import ALGORITHMS, GATHERS, PLAIN, SCALED, Problem

__all__ = ["MAX_RANKS", "legal"]

MAX_RANKS = 8  # kMaxRanks of csrc/core/segment_layout.h: slots per tile and words per signal
MAX_PRODUCTS = 4  # kMaxProducts of csrc/cuda/kernels/gemm_arguments.h
INT32_LIMIT = 1 << 31  # coordinates in tensor maps and tile numbers are 32-bit
MAX_ROWS = (
    1 << 18
)  # kMaxTileSignals of csrc/core: 4096 row blocks of 128, and an all-reduce needs words for its sums
_STAGING_SHARE = 8  # of the memory; the rest is the model's
KERNEL_DTYPES = ("bfloat16", "float16")
SUMMED_DTYPES = ("bfloat16", "float16", "float32")  # what the all-reduce kernels add
PEERS = ("fused", "one_shot", "two_shot")  # these read and write the memory of the peers


def legal(problem: Problem, hardware: Hardware) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """(candidates that can serve the call, [(candidate, why it cannot)]). Baseline always can."""
    rejected = []
    for algorithm in ALGORITHMS:
        why = refuses(algorithm, problem, hardware)
        if why:
            rejected.append((algorithm, why))
    bad = dict(rejected)
    return tuple(a for a in ALGORITHMS if a not in bad), tuple(rejected)


def refuses(algorithm: str, problem: Problem, hardware: Hardware) -> str:
    """Why this algorithm cannot serve the call, empty when it can."""
    if algorithm == "baseline":
        return ""
    if problem.world_size == 1:
        return "one rank: there is nothing to communicate"
    if problem.rows == 0 or problem.width == 0:
        return "the call has no elements"
    if algorithm == "decomposed":
        return _decomposed_refuses(problem)
    return _memory_refuses(problem, hardware) or (
        _fused_refuses(problem, hardware) if algorithm == "fused" else _shot_refuses(algorithm, problem)
    )


def _memory_refuses(problem: Problem, hardware: Hardware) -> str:
    if problem.world_size > MAX_RANKS:
        return f"the kernels serve up to {MAX_RANKS} ranks, the group has {problem.world_size}"
    if not hardware.peer_access:
        return "the GPUs cannot access each other's memory (no P2P)"
    if problem.unavailable:
        return problem.unavailable
    if problem.largest_dim >= INT32_LIMIT:
        return "a dimension has 2^31 elements or more"
    if 2 * problem.message_bytes > hardware.memory // _STAGING_SHARE:
        return f"staging of 2 x {problem.message_bytes} bytes is more than 1/{_STAGING_SHARE} of the GPU's memory"
    if not problem.dim_leads:
        return "the gathered or scattered dim is not in front: the rows of a rank do not lie together"
    return ""


def _fused_refuses(problem: Problem, hardware: Hardware) -> str:
    if problem.op in PLAIN:
        return "the op has no product"
    if not hardware.mainloop:
        major, minor = hardware.capability
        return f"there is no GEMM kernel for compute capability {major}.{minor}"
    if problem.op in SCALED:
        if hardware.mainloop != "sm_90a":
            return "fp8 products need sm_90 (Hopper)"
        if problem.dtype != "float8_e4m3fn":
            return f"the scaled kernels multiply float8_e4m3fn, not {problem.dtype}"
        if problem.out_dtype != "bfloat16":
            return f"the scaled kernels write bfloat16, not {problem.out_dtype}"
        if problem.op in GATHERS and problem.width % 16:
            return "fp8 rows must be a multiple of 16 elements long"
    elif problem.dtype not in KERNEL_DTYPES:
        return f"the GEMM kernels multiply bfloat16 and float16, not {problem.dtype}"
    if problem.rows > MAX_ROWS:
        return f"the kernels have signals for {MAX_ROWS} rows a call"
    if problem.products > MAX_PRODUCTS:
        return f"the kernels take up to {MAX_PRODUCTS} products a call, this one has {problem.products}"
    return ""


def _shot_refuses(algorithm: str, problem: Problem) -> str:
    if "all_gather" in problem.op:
        if algorithm == "two_shot":
            return "a gather has no sum to take in two steps"
        if problem.op in SCALED:
            return "rows of an odd number of bytes" if problem.width % 2 else ""
        return (
            ""
            if problem.itemsize <= 8
            else f"the gather kernel copies elements of up to 8 bytes, not {problem.dtype}"
        )
    if problem.dtype not in SUMMED_DTYPES and problem.op not in SCALED:
        return f"the reduction kernels add bfloat16, float16 and float32, not {problem.dtype}"
    if "reduce_scatter" in problem.op and algorithm == "two_shot":
        return "a reduce-scatter is one step"
    return ""


def _decomposed_refuses(problem: Problem) -> str:
    if problem.op in PLAIN:
        return "the op has no product"
    return ""
