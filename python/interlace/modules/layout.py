"""What a parameter of a split model is a part of: the shape of the whole, and which slices of it each rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .shard import Range, Shards

__all__ = ["ParameterLayout", "layouts_of", "take"]


@dataclass(frozen=True)
class ParameterLayout:
    """The whole parameter `shape`, cut along `dim` over the ranks of the group `group_name`.

    pieces: for every rank the slices [start, end) of `dim` that it holds, in the order in which its local tensor
    holds them: one for a plain shard, several for packed q|k|v, none for an empty shard. Slices of different
    ranks may overlap: the holders of an index hold equal values and equal gradients. dim None: every rank holds
    the whole.
    """

    shape: tuple[int, ...]
    dim: int | None
    pieces: tuple[tuple[Range, ...], ...]
    group_name: str

    @classmethod
    def of_shards(
        cls, shape: Sequence[int], dim: int | None, shards: Shards, group_name: str
    ) -> ParameterLayout:
        """The layout of a parameter of the whole shape `shape` of which every rank holds its `shards` of `dim`."""
        ranks = range(len(shards.sizes))
        pieces = () if dim is None else tuple(shards.ranges(rank) for rank in ranks)
        return cls(tuple(shape), dim, pieces, group_name)

    def ranges(self, rank: int) -> tuple[Range, ...]:
        """What `rank` holds of `dim`, without empty slices; () when the parameter is not cut."""
        return tuple((a, b) for a, b in self.pieces[rank] if b > a) if self.dim is not None else ()

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of what `rank` holds."""
        if self.dim is None:
            return self.shape
        size = sum(end - start for start, end in self.ranges(rank))
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])

    def take(self, whole: Tensor, rank: int) -> Tensor:
        """What `rank` holds of the whole: a view where it is one slice, else a copy. ValueError for another shape."""
        if tuple(whole.shape) != self.shape:
            raise ValueError(
                f"expected a whole parameter of shape {list(self.shape)}, got {list(whole.shape)}"
            )
        return whole if self.dim is None else take(whole, self.dim, self.ranges(rank))

    def placed(self, rank: int) -> tuple[tuple[int, Range], ...]:
        """The slices of `rank` as (place, (start, end)): each starts at `place` of `dim` in the local tensor."""
        slices: list[tuple[int, Range]] = []
        place = 0
        for start, end in self.ranges(rank):
            slices.append((place, (start, end)))
            place += end - start
        return tuple(slices)

    def owned(self, rank: int) -> tuple[tuple[int, Range], ...]:
        """The slices that count for `rank` where ranks overlap, those that no lower rank holds, as `placed` gives
        them.

        Over all ranks they cover the whole once.
        """
        before = [held for lower in range(rank) for held in self.ranges(lower)]
        return tuple(
            (place + a - start, (a, b))
            for place, (start, end) in self.placed(rank)
            for a, b in _without((start, end), before)
        )

    def foreign(self, rank: int) -> tuple[tuple[int, Range], ...]:
        """The rest of what `rank` holds: slices that a lower rank owns, as `placed` gives them."""
        own = [span for _, span in self.owned(rank)]
        return tuple(
            (place + a - start, (a, b))
            for place, (start, end) in self.placed(rank)
            for a, b in _without((start, end), own)
        )

    @property
    def overlapping(self) -> bool:
        """True when several ranks hold the same index of a cut dim."""
        if self.dim is None:
            return False
        held = sum(end - start for rank in range(len(self.pieces)) for start, end in self.ranges(rank))
        return held > self.shape[self.dim]


def take(whole: Tensor, dim: int, ranges: Iterable[Range]) -> Tensor:
    """The slices of `dim` one behind the other: a view where there is one, else a copy."""
    parts = [whole.narrow(dim, start, end - start) for start, end in ranges]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim) if parts else whole.narrow(dim, 0, 0)


def _without(span: Range, taken: Sequence[Range]) -> list[Range]:
    """The parts of `span` that lie in none of `taken`, in ascending order."""
    left = [span]
    for low, high in taken:
        left = [
            part
            for start, end in left
            for part in ((start, min(end, low)), (max(start, high), end))
            if part[0] < part[1]
        ]
    return left


def layouts_of(model: nn.Module) -> dict[str, ParameterLayout]:
    """Layout of every parameter of `model` that is cut, by its dotted name; tied parameters under each name.

    Asks every module that has a method `parameter_layouts`, which names its own parameters. What is not in here is
    the same on every rank, but for DTensors, which say themselves how they are cut.
    """
    found: dict[str, ParameterLayout] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        # asked of the class: wrappers hand attributes on to what they wrap, whose names are not theirs
        describe = getattr(type(module), "parameter_layouts", None)
        if describe is None:
            continue
        prefix = f"{name}." if name else ""
        layouts = describe(module).items()
        found |= {f"{prefix}{own}": layout for own, layout in layouts if layout.dim is not None}
    return found
