"""What one process of `interlace plan --measure` times. All processes run the same probes at the same moments."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..functional import (
    all_gather,
    all_gather_linear,
    all_reduce,
    linear_all_reduce,
    linear_reduce_scatter,
    reduce_scatter,
)

__all__ = ["run_probes"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_TURNS = 7


def run_probes(rank: int, ranks: int, folder: str, quick: bool) -> None:
    """One process: joins the others over gloo, times everything, rank 0 writes results.json into folder."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    torch.manual_seed(rank)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    try:
        with torch.no_grad():
            results = {
                "cpu": _cpu(),
                "threads": torch.get_num_threads(),
                "gemms": _gemms(quick),
                "copy_bytes_per_second": _copy(),
                "small_op_seconds": _small(),
                "attention": _attention(),
                "collectives": _collectives(ranks, quick) if ranks > 1 else {},
                "fused": _fused(ranks, quick) if ranks > 1 else [],
            }
        if rank == 0:
            (Path(folder) / "results.json").write_text(json.dumps(results), encoding="utf-8")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _seconds(call: Callable[[], object], turns: int = _TURNS) -> float:
    """Median over the turns of the slowest process's time. Collective."""
    call()
    times = torch.zeros(turns, dtype=torch.float64)
    for turn in range(turns):
        dist.barrier()
        begin = time.perf_counter()
        call()
        times[turn] = time.perf_counter() - begin
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return float(times.median())


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gemms(quick: bool) -> list[dict[str, Any]]:
    rows = (16, 128, 1024)
    widths = ((256, 256), (1024, 1024)) if quick else ((256, 256), (1024, 1024), (4096, 1024), (1024, 4096))
    found = []
    for name, dtype in _DTYPES.items():
        for m in rows:
            for n, k in widths:
                x, weight = torch.randn(m, k, dtype=dtype), torch.randn(n, k, dtype=dtype)
                seconds = _seconds(lambda x=x, weight=weight: torch.nn.functional.linear(x, weight))
                found.append({"m": m, "n": n, "k": k, "dtype": name, "seconds": seconds})
    return found


def _copy() -> float:
    source = torch.randn(8 << 20)  # 32 MiB: beyond a core's own caches
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source))


def _small() -> float:
    """Seconds of an elementwise op on next to nothing."""
    x = torch.ones(16)

    def many() -> None:
        for _ in range(100):
            torch.add(x, x)

    return _seconds(many) / 100


def _attention() -> dict[str, float]:
    batch, heads, seq, width = 1, 8, 512, 64
    q, k, v = (torch.randn(batch, heads, seq, width) for _ in range(3))
    seconds = _seconds(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    return {"flops": 4.0 * batch * heads * seq * seq * width / 2, "seconds": seconds}


def _collectives(ranks: int, quick: bool) -> dict[str, list[list[float]]]:
    """[bytes, seconds] of each collective; bytes: of the whole message."""
    curves: dict[str, list[list[float]]] = {}
    for size in (4 << 10, 256 << 10, 4 << 20) if quick else (4 << 10, 64 << 10, 512 << 10, 4 << 20, 16 << 20):
        x = torch.randn(ranks, size // 4 // ranks)
        calls: dict[str, Callable[[], object]] = {
            "interlace all_reduce": lambda x=x: all_reduce(x, group=None),
            "interlace all_gather": lambda x=x: all_gather(x[:1], group=None),
            "interlace reduce_scatter": lambda x=x: reduce_scatter(x, group=None),
            "gloo all_reduce": lambda x=x: dist.all_reduce(x),
        }
        for name, call in calls.items():
            curves.setdefault(name, []).append([float(x.nbytes), _seconds(call)])
    return curves


def _fused(ranks: int, quick: bool) -> list[dict[str, Any]]:
    """Seconds of each fused op for [m, k] x [k, n] before the split."""
    found = []
    sizes = ((256, 1024, 1024),) if quick else ((64, 1024, 1024), (256, 1024, 1024), (1024, 1024, 1024))
    for name, dtype in _DTYPES.items():
        for m, n, k in sizes:
            x, column = torch.randn(m // ranks, k, dtype=dtype), torch.randn(n // ranks, k, dtype=dtype)
            part, row = torch.randn(m, k // ranks, dtype=dtype), torch.randn(n, k // ranks, dtype=dtype)
            calls: dict[str, Callable[[], object]] = {
                "all_gather_gemm": lambda x=x, w=column: all_gather_linear(x, w, group=None),
                "gemm_reduce_scatter": lambda x=part, w=row: linear_reduce_scatter(x, w, group=None),
                "gemm_all_reduce": lambda x=part, w=row: linear_all_reduce(x, w, group=None),
            }
            for op, call in calls.items():
                found.append({"op": op, "m": m, "n": n, "k": k, "dtype": name, "seconds": _seconds(call)})
    return found
