"""One whole tensor out of its shards."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from ..groups import resolve
from ..modules.held import as_dtensor
from ..modules.layout import ParameterLayout

__all__ = ["is_rank0", "whole_tensor"]


def is_rank0() -> bool:
    """True on rank 0 of all, and in a process without a group."""
    return not dist.is_initialized() or dist.get_rank() == 0


def whole_tensor(
    tensor: Tensor, layout: ParameterLayout | None, *, rank0_only: bool = False
) -> Tensor | None:
    """The whole of which `tensor` is this rank's part, a new tensor; None where rank0_only and this is not rank 0.

    Collective over the group of the layout and the mesh of a DTensor. Where ranks overlap the first holder's values
    are taken. Needs the whole and one shard of memory.
    """
    local = tensor.detach()
    split = as_dtensor(local)
    if split is not None:
        local = split.full_tensor()
    wanted = not rank0_only or is_rank0()
    if layout is None or layout.dim is None:
        return local.clone() if wanted else None
    info = resolve(layout.group_name)
    group = _resolve_process_group(layout.group_name)
    root = None
    if rank0_only:
        if 0 not in dist.get_process_group_ranks(group):
            return None  # a replica: the group with rank 0 has the same
        root = dist.get_group_rank(group, 0)
    whole = local.new_empty(layout.shape) if root in (None, info.rank) else None
    for holder in range(info.world_size):
        owned = layout.owned(holder)
        size = sum(end - start for _, (start, end) in owned)
        if not size:
            continue
        if holder == info.rank:
            part = _packed(local, layout.dim, owned)
        else:
            part = local.new_empty((*layout.shape[: layout.dim], size, *layout.shape[layout.dim + 1 :]))
        if part.numel():
            _carry(part, holder, root, info.rank, group)
        if whole is not None:
            place = 0
            for _, (start, end) in owned:
                whole.narrow(layout.dim, start, end - start).copy_(
                    part.narrow(layout.dim, place, end - start)
                )
                place += end - start
    return whole


def _packed(local: Tensor, dim: int, owned: tuple[tuple[int, tuple[int, int]], ...]) -> Tensor:
    return torch.cat([local.narrow(dim, place, end - start) for place, (start, end) in owned], dim)


def _carry(part: Tensor, holder: int, root: int | None, rank: int, group: dist.ProcessGroup) -> None:
    """From its holder to `root`, or to all."""
    if root is None:
        dist.broadcast(part, group=group, group_src=holder)
    elif holder != root and rank == holder:
        dist.send(part, group=group, group_dst=root)
    elif holder != root and rank == root:
        dist.recv(part, group=group, group_src=holder)
