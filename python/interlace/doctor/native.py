"""The native part: whether it is loaded, the tile engine, and the path of each op by dtype and size."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["native", "ranges"]

OPS = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")
DTYPES = ("float32", "bfloat16", "float16", "float64")
CUDA_DTYPES = ("bfloat16", "float32")
DESCRIBED = "NVIDIA H200"  # whose choices are shown where there is no GPU
CUDA_WIDTH = 8192  # of the rows, for the choices that are shown
LARGEST_ROWS = 1 << 20  # beyond it nothing changes: the choice is between few and many rows

Choice = tuple[str, str]  # algorithm, reason


def native() -> dict[str, Any]:
    """Loaded or why not; the engine; a row per op, dtype and range of M (rows of x): path and reason."""
    try:
        importlib.import_module("interlace.functional")
    except Exception as error:  # a half-built package can fail in any way: that is the finding
        return {"error": f"{type(error).__name__}: {error}", "engine": {}, "paths": []}
    isa, float32_tiles, bfloat16_tiles, _ = torch.ops.interlace.engine_info()
    tiles = {"float32": float32_tiles, "bfloat16": bfloat16_tiles, "float16": float32_tiles, "float64": False}
    engine: dict[str, Any] = {"instruction set": isa}
    for dtype, there in tiles.items():
        engine[dtype] = "brgemm tiles" if there else "torch.mm"
    if float32_tiles and not bfloat16_tiles:
        engine["bfloat16"] = "brgemm tiles, widened to float32"
    if float32_tiles:
        engine["float16"] = "brgemm tiles, widened to float32"
    return {"error": None, "engine": engine, "paths": [row for op in OPS for row in _paths(op)]}


def _paths(op: str) -> Iterator[dict[str, str]]:
    for dtype in DTYPES:

        def choose(rows: int, dtype: str = dtype) -> Choice:
            algorithm, reason = torch.ops.interlace.choose(op, dtype, rows)
            return algorithm, reason

        for size, (algorithm, reason) in ranges(choose):
            row = {"op": op, "device": "cpu", "dtype": dtype, "size": size}
            yield {**row, "algorithm": algorithm, "reason": reason}
    yield from _cuda_paths(op)


def _cuda_paths(op: str) -> Iterator[dict[str, str]]:
    """What a group of this machine's GPUs would take, or one of eight H200 where there is none."""
    hardware = importlib.import_module("interlace.hardware")
    heuristics = importlib.import_module("interlace.heuristics")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpu = hardware.describe(torch.device("cuda", 0)) if count else hardware.KNOWN[DESCRIBED]
    ranks = max(2, count) if count else 8
    table = heuristics.load()
    library = importlib.import_module("interlace._native").CUDA_LIBRARY
    missing = "" if library.exists() or not count else "interlace_cuda.so is not built"
    for dtype in CUDA_DTYPES:

        def choose(rows: int, dtype: str = dtype) -> Choice:
            problem = heuristics.Problem(
                op,
                dtype,
                rows,
                CUDA_WIDTH,
                ranks,
                unavailable=missing,
                itemsize=2 if dtype == "bfloat16" else 4,
            )
            decision = heuristics.choose(problem, gpu, table)
            return decision.algorithm, decision.reason

        where = f"{ranks} x {gpu.name}" + ("" if count else ", as described: no GPU here")
        for size, (algorithm, reason) in ranges(choose):
            row = {"op": op, "device": "cuda", "dtype": dtype, "size": size}
            yield {**row, "algorithm": algorithm, "reason": f"{reason} ({where})"}


def ranges(choose: Callable[[int], Choice]) -> Iterator[tuple[str, Choice]]:
    """Ranges of M over which a choice stays the same, their exact bounds found by bisection."""
    first = 1
    while True:
        choice, step = choose(first), 1
        while first + step <= LARGEST_ROWS and choose(first + step) == choice:
            step *= 2
        if first + step > LARGEST_ROWS:
            yield f"M >= {first}", choice
            return
        same, other = first + step // 2, first + step
        while other - same > 1:
            middle = (same + other) // 2
            same, other = (middle, other) if choose(middle) == choice else (same, middle)
        yield f"M {first}..{same}" if same > first else f"M {first}", choice
        first = other
