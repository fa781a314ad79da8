"""Where a local tensor lies in the whole: boxes, for plain shards, DTensors, and DTensors of shards."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .layout import ParameterLayout

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["Box", "as_dtensor", "held_boxes", "local_part"]


def as_dtensor(tensor: Any) -> DTensor | None:
    """`tensor` when it is a DTensor. Does not load their package (half a second): nobody who has one is without it."""
    package = sys.modules.get("torch.distributed.tensor")
    return tensor if package is not None and isinstance(tensor, package.DTensor) else None


@dataclass(frozen=True)
class Box:
    """`size` elements that start at `place` in the local tensor and at `start` in the whole one."""

    place: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]

    def of_local(self, local: Tensor) -> Tensor:
        """The elements as a view of the local tensor."""
        for dim, (place, size) in enumerate(zip(self.place, self.size, strict=True)):
            local = local.narrow(dim, place, size)
        return local

    def of_whole(self, whole: Tensor) -> Tensor:
        """The elements as a view of the whole tensor."""
        return whole[self.slices] if self.size else whole

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the elements in the whole tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.size, strict=True))


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds, detached: the tensor itself, or the local tensor of a DTensor."""
    tensor = tensor.detach()
    split = as_dtensor(tensor)
    return tensor if split is None else split.to_local()


def held_boxes(
    tensor: Tensor, layout: ParameterLayout | None, rank: int, *, owned: bool | None = None
) -> list[Box]:
    """The boxes of the whole that `tensor` holds on `rank` of the layout's group, without empty ones.

    tensor: a parameter, its gradient, or a state of its optimizer. A DTensor with a layout is a further cut of
    what the layout gives to the rank (fully_shard over a split model). owned True: only what no lower rank holds,
    so that the boxes of all ranks of the group cover the whole once; False: only the rest. A replicated tensor is
    owned by every rank.
    """
    size, offset = tuple(tensor.shape), (0,) * tensor.dim()
    split = as_dtensor(tensor)
    if split is not None:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        size, offset = compute_local_shape_and_global_offset(split.shape, split.device_mesh, split.placements)
    if layout is None or layout.dim is None:
        whole = Box((0,) * len(size), tuple(offset), tuple(size))
        return [whole] if 0 not in size and owned is not False else []
    dim = layout.dim
    low, high = offset[dim], offset[dim] + size[dim]
    boxes = []
    slices = {None: layout.placed, True: layout.owned, False: layout.foreign}[owned](rank)
    for place, (start, end) in slices:
        first, last = max(place, low), min(place + end - start, high)
        if first >= last or 0 in (*size[:dim], *size[dim + 1 :]):
            continue
        places, starts, sizes = [0] * len(size), list(offset), list(size)
        places[dim], starts[dim], sizes[dim] = first - low, start + first - place, last - first
        boxes.append(Box(tuple(places), tuple(starts), tuple(sizes)))
    return boxes
