"""The loss of a sequence whose tokens are on several ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from ..functional import all_reduce
from ..groups import Group, resolve

__all__ = ["global_mean"]


def global_mean(total: Tensor, count: Tensor | int, *, group: Group) -> Tensor:
    """Sum over ranks of `total` / sum over ranks of `count`, the same on every rank; scalars.

    total: the sum of this rank's token losses, count: how many tokens it has. The gradient of `total` is world_size
    times that of the plain mean, so that averaging gradients over ranks, as DDP and `fully_shard` do, gives the
    gradient of the unsplit sequence. 0 when no rank has a token.
    """
    info = resolve(group)
    counts = torch.as_tensor(count, dtype=torch.float32, device=total.device).reshape(1)
    tokens = all_reduce(counts, group=info.name)[0].clamp(min=1)
    return all_reduce(total.reshape(1) / tokens, group=info.name)[0]
