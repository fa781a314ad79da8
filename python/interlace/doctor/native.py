"""The native part: whether it is loaded, the tile engine, and the path of each op by dtype and size."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["native", "ranges"]

OPS = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")
DTYPES = ("float32", "bfloat16", "float16", "float64")
NO_CUDA_KERNELS = "no fused CUDA kernel of this op yet: torch.distributed serves GPU tensors"
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
    row = {"op": op, "device": "cuda", "dtype": "all", "size": "M >= 1"}
    yield {**row, "algorithm": "reference", "reason": NO_CUDA_KERNELS}


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
