"""Inputs of the correctness part: shards of any length, two layouts, integers that sum exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
# (N, K): tails in every direction; K below, at and above a stage; K that no 16-byte load divides
SHAPES = ((128, 64), (256, 256), (136, 72), (8, 8), (520, 264), (384, 1096), (5, 7), (130, 33))
SMALL_SHAPES = ((16, 8), (5, 7))
# rows of a rank, taken in turn: full tiles, one row, none, tails
ROWS = (128, 1, 0, 257, 40, 300, 129, 64)
SMALL_ROWS = (4, 1, 0, 5)


@dataclass(frozen=True)
class Scope:
    """What the part runs over; smaller where no GPU does the work."""

    device: str
    worlds: tuple[int, ...] = (1, 2, 3, 4, 8)
    shapes: tuple[tuple[int, int], ...] = SHAPES
    rows: tuple[int, ...] = ROWS

    def rows_of(self, world_size: int, first: int) -> list[int]:
        """Rows of every rank: a stretch of the list, at least one row in all."""
        rows = [self.rows[(first + rank) % len(self.rows)] for rank in range(world_size)]
        return rows if sum(rows) > 0 else [self.rows[0], *rows[1:]]

    def alone(self) -> Scope:
        """The same with one rank."""
        return replace(self, worlds=(1,))


def small(device: str) -> Scope:
    """A scope for sanitizers and rehearsals."""
    return Scope(device, worlds=(1, 2, 3), shapes=SMALL_SHAPES, rows=SMALL_ROWS)


@dataclass
class Source:
    """Random tensors from one seed, drawn on the CPU so that every device sees the same numbers."""

    device: str
    seed: int

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)

    def integers(self, *shape: int, dtype: torch.dtype, bound: int = 1) -> Tensor:
        """Integers within [-bound, bound]: sums of products of a few hundred are exact in every dtype."""
        values = torch.randint(-bound, bound + 1, shape, generator=self._generator)
        return values.to(torch.float32).to(dtype).to(self.device)

    def normal(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Standard normal numbers, rounded to dtype."""
        return torch.randn(shape, generator=self._generator).to(dtype).to(self.device)

    def weight(self, columns: int, depth: int, *, dtype: torch.dtype, mn_major: bool, exact: bool) -> Tensor:
        """[columns, depth], stored by rows, or by columns (mn_major)."""
        draw = self.integers if exact else self.normal
        if mn_major:
            return draw(depth, columns, dtype=dtype).t()
        return draw(columns, depth, dtype=dtype)

    def scale(self, length: int) -> Tensor:
        """fp8 scales: powers of two, so that they change no digit."""
        exponents = torch.randint(-2, 3, (length,), generator=self._generator)
        return torch.exp2(exponents.float()).to(self.device)


def exact_product(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T in fp64."""
    return x.double() @ weight.double().t()


def rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest value of dtype, in fp64: what one rounding at the end gives."""
    return value.to(dtype).double()


def total(parts: Sequence[Tensor]) -> Tensor:
    """Their sum in fp64."""
    return torch.stack([part.double() for part in parts]).sum(0)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight in fp64."""
    value = x.double()
    value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    return value if weight is None else value * weight.double()
