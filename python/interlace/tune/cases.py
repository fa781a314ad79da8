"""What is measured: ops and shapes of dense transformers, and the candidates of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..hardware import Hardware
from ..heuristics import Launch, Problem
from ..heuristics.candidates import legal
from ..heuristics.choose import default_launch
from ..heuristics.problem import GATHERS, SCALED

__all__ = ["MODELS", "Candidate", "Case", "candidates", "cases", "problem_of"]

# hidden and intermediate width: the published configurations of Llama 3 8B and 70B
MODELS = {"8b": (4096, 14336), "70b": (8192, 28672)}
ROWS = tuple(1 << power for power in range(15))  # 1 .. 16384
QUICK_ROWS = (1, 16, 256, 2048, 8192)
OPS = (
    "all_gather_gemm",
    "gemm_reduce_scatter",
    "gemm_all_reduce",
    "gemm_reduce_scatter_norm",
    "gemm_all_reduce_norm",
)
COMM_BLOCKS = (0, 4, 8, 16)


@dataclass(frozen=True)
class Case:
    """One bucket. rows: over all ranks; width: K of a gather, N of a reduction; cuts: the other size, per rank, of
    each product that a transformer has with this width. Their times are added."""

    op: str
    dtype: torch.dtype
    rows: int
    width: int
    cuts: tuple[int, ...]


@dataclass(frozen=True)
class Candidate:
    """One way to be timed."""

    algorithm: str
    launch: Launch

    @property
    def name(self) -> str:
        """For tables: fused/256/8, baseline."""
        if self.algorithm != "fused":
            return self.algorithm
        return f"fused/{self.launch.tile_columns}/{self.launch.comm_blocks}"


def cases(
    world_size: int, models: tuple[str, ...], *, scaled: bool = True, quick: bool = False
) -> list[Case]:
    """The buckets of these models cut over `world_size` ranks, few rows first. fp8 where `scaled`."""
    found = []
    ops = [(op, torch.bfloat16) for op in OPS] + [(op, torch.float8_e4m3fn) for op in SCALED if scaled]
    for model in models:
        hidden, intermediate = MODELS[model]
        cuts = tuple(max(16, size // world_size // 16 * 16) for size in (hidden, intermediate))
        for op, dtype in ops:
            for rows in QUICK_ROWS if quick else ROWS:
                # a gather needs a row on every rank
                if op not in GATHERS or rows >= world_size:
                    found.append(Case(op, dtype, rows, hidden, cuts))
    return found


def problem_of(case: Case, world_size: int, unavailable: str = "") -> Problem:
    """The case as the choice sees it."""
    return Problem(
        op=case.op,
        dtype=str(case.dtype).removeprefix("torch."),
        rows=case.rows,
        width=case.width,
        world_size=world_size,
        largest_dim=max(case.rows, case.width),
        unavailable=unavailable,
        itemsize=case.dtype.itemsize,
        out_dtype="bfloat16" if case.op in SCALED else "",
    )


def candidates(problem: Problem, hardware: Hardware) -> Iterator[Candidate]:
    """Every legal algorithm, the fused ones with each tile and each number of copying blocks."""
    first = default_launch(problem, hardware)
    tiles = (128, 256) if hardware.mainloop == "sm_90a" and problem.dtype == "bfloat16" else (128,)
    for algorithm in legal(problem, hardware)[0]:
        if algorithm != "fused":
            yield Candidate(algorithm, first)
            continue
        for tile in tiles:
            for blocks in COMM_BLOCKS:
                yield Candidate(algorithm, Launch(tile_columns=tile, comm_blocks=blocks))
