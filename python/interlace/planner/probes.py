"""What one process of `interlace plan --measure` times. All processes run the same probes at the same moments."""

from __future__ import annotations

import json
import os
import platform
import sys
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
# Kernels compute.layer_seconds counts for one dense layer, forward and backward: 4 products, attention, 7 passes;
# twice the products, 2.5 times attention, 1.5 times the passes.
LAYER_KERNELS = (4 + 1 + 7) + (8 + 2.5 + 10.5)


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


def _dtypes(quick: bool) -> dict[str, torch.dtype]:
    return {"fp32": torch.float32} if quick else _DTYPES


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
    for name, dtype in _dtypes(quick).items():
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


class _Block(torch.nn.Module):
    """A layer as eager models write it, so small that only calls cost."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(hidden) for _ in range(2))
        self.linears = torch.nn.ModuleList(torch.nn.Linear(hidden, hidden, bias=False) for _ in range(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        q, k, v = (linear(y).view(1, 8, 2, 8).transpose(1, 2) for linear in self.linears[:3])
        q, k = q * 0.5 + k * 0.5, k * 0.5 + q * 0.5  # as many passes as a rotation
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.linears[3](y.transpose(1, 2).reshape(x.shape))
        y = self.norms[1](x)
        y = torch.nn.functional.silu(self.linears[4](y)) * self.linears[5](y)
        out: torch.Tensor = x + self.linears[6](y)
        return out


def _small() -> float:
    """Seconds that calls cost per kernel the plan counts: forward and backward of an almost empty layer."""
    block, x = _Block(), torch.ones(1, 8, 16)

    def many() -> None:
        with torch.enable_grad():
            for _ in range(10):
                block(x).sum().backward()

    return _seconds(many) / 10 / LAYER_KERNELS


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
    for name, dtype in _dtypes(quick).items():
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


if __name__ == "__main__":
    where, count, length, own = sys.argv[1:]
    run_probes(int(own), int(count), where, length == "quick")
