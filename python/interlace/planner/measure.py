"""A profile of this machine for `--cluster`: products, attention, memory, our collectives and fused ops, gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from os import PathLike
from pathlib import Path
from statistics import median
from typing import Any

from .cluster import read_cluster, write_cluster
from .hardware import Cluster, Device, FusedPoint, GemmPoint, Link

__all__ = ["fit_link", "measure", "profile_of"]

TIMEOUT_SECONDS = 600  # ten times what a quiet machine needs


def measure(path: str | PathLike[str] | None = None, *, ranks: int = 2, quick: bool = False) -> Cluster:
    """Measures this machine's CPUs with `ranks` processes at work at the same time; writes the profile to path.

    Every process has its share of the cores and of the memory and is one device of the profile. The peak by dtype is
    the fastest product met; efficiencies are shares of it. The link is that of interlace's all-reduce; gloo's and the
    other collectives' figures are kept beside it under `measured`. quick: fewer sizes. Raises ChildProcessError
    when a process fails.
    """
    if ranks < 1:
        raise ValueError(f"measure: ranks={ranks}; expected at least 1")
    with tempfile.TemporaryDirectory() as folder:
        _probe(ranks, folder, quick)
        results = json.loads((Path(folder) / "results.json").read_text(encoding="utf-8"))
    cluster = profile_of(results, ranks)
    if path is None:
        return cluster
    write_cluster(cluster, path)
    return read_cluster(path)


def _probe(ranks: int, folder: str, quick: bool) -> None:
    """Runs the probes in processes of their own; when one fails the others are ended."""
    command = [
        sys.executable,
        "-m",
        "interlace.planner.probes",
        folder,
        str(ranks),
        "quick" if quick else "full",
    ]
    running = [
        subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(ranks)
    ]
    try:
        for rank, process in enumerate(running):
            _, complaint = process.communicate(timeout=TIMEOUT_SECONDS)
            if process.returncode:
                last = (complaint.strip().splitlines() or ["no message"])[-1]
                raise ChildProcessError(f"measure: process {rank} of {ranks} failed: {last}")
    finally:
        for process in running:
            process.kill()
            process.communicate()


def profile_of(results: dict[str, Any], ranks: int) -> Cluster:
    """The Cluster the figures of run_probes describe."""
    rates: dict[str, float] = {}
    for row in results["gemms"]:
        rate = 2.0 * row["m"] * row["n"] * row["k"] / row["seconds"]
        rates[row["dtype"]] = max(rates.get(row["dtype"], 0.0), rate)
    peak = {dtype: _rounded(rate) for dtype, rate in rates.items()}
    gemms = tuple(
        GemmPoint(
            row["m"],
            row["n"],
            row["k"],
            _rounded(min(1.0, 2.0 * row["m"] * row["n"] * row["k"] / row["seconds"] / peak[row["dtype"]])),
            row["dtype"],
        )
        for row in results["gemms"]
    )
    fused = tuple(
        FusedPoint(row["op"], row["m"], row["n"], row["k"], ranks, _rounded(row["seconds"]), row["dtype"])
        for row in results["fused"]
    )
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    core = results["attention"]
    device = Device(
        name=f"{results['cpu']}, {results['threads']} thread(s)",
        memory=total // ranks,
        peak=peak,
        memory_bandwidth=_rounded(results["copy_bytes_per_second"]),
        efficiency=_rounded(max(point.efficiency for point in gemms if point.dtype == "fp32")),
        attention_efficiency=_rounded(min(1.0, core["flops"] / core["seconds"] / peak["fp32"])),
        memory_efficiency=1.0,
        kernel_latency=_rounded(results["small_op_seconds"]),
        slowdown=1.0,  # a core is its own copy engine: what it sends it does not compute meanwhile
        gemms=gemms,
        fused=fused,
    )
    curves = results["collectives"]
    node = (
        fit_link("interlace, shared memory", curves["interlace all_reduce"], ranks) if ranks > 1 else _LONELY
    )
    measured = {name: _described(fit_link(name, curve, ranks)) for name, curve in curves.items()}
    return Cluster(
        name=f"this machine, {ranks} processes",
        device=device,
        devices_per_node=ranks,
        node=node,
        source="measured by interlace plan --measure",
        measured=measured,
    )


_LONELY = Link("none", bandwidth=1e9, latency=0.0, ranks=1, efficiency=1.0)


def fit_link(name: str, curve: list[list[float]], ranks: int) -> Link:
    """Latency and bandwidth from [bytes, seconds] points: T = a + 2 (n - 1) / n S / B, least relative squares.

    For an all-reduce; a gather's or scatter's B is what an all-reduce of twice the time would have.
    """
    # normal equations of sum ((a + b S - t) / t)^2
    each = [(1 / seconds**2, size, seconds) for size, seconds in curve]
    one, first, second = (sum(w * size**power for w, size, _ in each) for power in (0, 1, 2))
    right, mixed = sum(w * t for w, _, t in each), sum(w * t * size for w, size, t in each)
    determinant = one * second - first * first
    latency = (right * second - mixed * first) / determinant
    slope = (one * mixed - first * right) / determinant
    if latency <= 0:  # all points are bound by bandwidth
        latency, slope = 0.0, median(seconds / size for size, seconds in curve)
    if slope <= 0:  # all points are bound by latency
        latency, slope = median(seconds for _, seconds in curve), curve[-1][1] / curve[-1][0]
    volume = 2 * (ranks - 1) / ranks
    return Link(name, _rounded(volume / slope), _rounded(latency), ranks, efficiency=1.0)


def _described(link: Link) -> str:
    return f"{link.latency * 1e6:.1f} us + bytes at {link.bandwidth / 1e9:.2f} GB/s"


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
