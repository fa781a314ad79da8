"""Dropout where ranks hold shards of the activation: each drops elements of its own, or its part of one mask."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..groups import Group, resolve
from ..random import region
from .shard import Shards

__all__ = ["ParallelDropout"]


class ParallelDropout(nn.Module):
    """nn.Dropout of an activation whose dim `dim` is cut over the group (None: every rank holds all of it).

    x [.., s_r, ..] -> the same shape. By default the mask of the whole activation is drawn on every rank and each takes
    its part: bitwise the mask that nn.Dropout draws for the whole, so a split model drops what the unsplit one drops,
    at the price of drawing it all. own_mask=True draws only this rank's part, from a stream of its own
    (`interlace.random.region("sharded")`). dim: -2 for a shard of the sequence, -1 for one of features. sizes of
    the shards are torch.chunk's; forward(x, size=S) names the whole length when they are uneven.
    dX = mask dY / (1 - p). Needs ranks whose default generators are in step (`interlace.random`). ValueError for p
    outside [0, 1].
    """

    def __init__(
        self, p: float = 0.5, *, dim: int | None = None, group: Group = None, own_mask: bool = False
    ) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f"ParallelDropout: p={p}; expected 0 to 1")
        info = resolve(group)
        self.group_name, self.rank, self.world_size = info.name, info.rank, info.world_size
        self.p, self.dim, self.own_mask = p, dim, own_mask

    def forward(self, x: Tensor, *, size: int | None = None) -> Tensor:
        """x -> x with elements dropped; see the class."""
        if not self.training or self.p == 0 or self.dim is None or self.world_size == 1:
            return F.dropout(x, self.p, self.training)
        if self.own_mask:
            with region("sharded", group=self.group_name, device=x.device):
                return F.dropout(x, self.p)
        total = x.shape[self.dim] * self.world_size if size is None else size
        start, end = Shards.chunk(total, self.world_size).bounds(self.rank)
        if end - start != x.shape[self.dim]:
            raise ValueError(
                f"ParallelDropout: size={total} gives rank {self.rank} of {self.world_size} {end - start} of dim "
                f"{self.dim}, x has {x.shape[self.dim]}; pass the whole length"
            )
        shape = [*x.shape]
        shape[self.dim] = total
        kept = torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(1 - self.p)
        mask = kept.narrow(self.dim, start, end - start)
        return x * (mask if self.p == 1 else mask.div_(1 - self.p))

    def extra_repr(self) -> str:
        """The settings."""
        return f"p={self.p}, dim={self.dim}, own_mask={self.own_mask}"
