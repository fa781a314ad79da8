"""Which processes work together: groups by name, resolved once, with their symmetric memory.

The registry below is the package's only module-level state. Ops take a group by name (a ProcessGroup in an op
schema breaks tracing); modules keep the name, so they can be copied, pickled and compiled.
"""

from __future__ import annotations

import atexit
import warnings
import weakref
from dataclasses import dataclass
from typing import TypeAlias

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group

from . import symmetric_memory

__all__ = ["Group", "GroupInfo", "destroy", "init", "resolve"]

Group: TypeAlias = "dist.ProcessGroup | DeviceMesh | str | None"


@dataclass(frozen=True)
class GroupInfo:
    """A group as this rank sees it; `fallback` says why its ops run on torch.distributed, empty when they do not."""

    name: str
    rank: int
    world_size: int
    fallback: str = ""


_registry: dict[str, GroupInfo] = {}
_process_groups: dict[str, weakref.ref] = {}


def _process_group(group: Group) -> dist.ProcessGroup:
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "interlace: no process group; call torch.distributed.init_process_group first (torchrun sets its variables)"
        )
    if group is None:
        return dist.group.WORLD
    if isinstance(group, str):
        try:
            return _resolve_process_group(group)
        except Exception:
            raise ValueError(
                f"interlace: no process group is named {group!r} here; pass the ProcessGroup or DeviceMesh itself"
            ) from None
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names
            if names is None:
                raise ValueError(
                    f"interlace: expected a mesh of one axis, got {group.ndim} axes without names; name them "
                    '(mesh_dim_names=("dp", "tp")) and pick one, for example mesh["tp"]'
                )
            raise ValueError(
                f"interlace: expected a mesh of one axis, got axes {names}; pick one, for example "
                f'mesh["{"tp" if "tp" in names else names[-1]}"]'
            )
        return group.get_group()
    if isinstance(group, dist.ProcessGroup):
        return group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "interlace: this rank is not in the group; call the op only on the ranks of the group"
        )
    raise TypeError(
        f"interlace: group is a {type(group).__name__}; expected ProcessGroup, one-axis DeviceMesh, group name or None"
    )


def resolve(group: Group) -> GroupInfo:
    """The group's name, this rank and the world size; the first call for a group is collective (it sets up memory)."""
    if isinstance(group, str):
        info = _registry.get(group)
        if info is not None:
            return info
    process_group = _process_group(group)
    name = process_group.group_name
    known = _process_groups.get(name)
    if known is not None and known() is process_group:
        return _registry[name]
    return _set_up(process_group, timeout=None, workspace_bytes=None, first_epoch=0)


def init(
    group: Group = None,
    *,
    timeout: float | None = None,
    workspace_bytes: int | None = None,
    first_epoch: int = 0,
) -> GroupInfo:
    """Set up a group's symmetric memory now instead of at its first op. Collective: every rank of the group calls it.

    timeout: seconds a rank waits for a peer (default INTERLACE_TIMEOUT). workspace_bytes: first size of the
    workspace per rank. first_epoch: where the epoch counter starts (tests of the wrap-around). Raises ValueError
    when the group has been set up already: `destroy` it first.
    """
    if timeout is not None and not timeout > 0:
        raise ValueError(f"interlace.init: timeout={timeout}; expected seconds > 0")
    if workspace_bytes is not None and workspace_bytes <= 0:
        raise ValueError(f"interlace.init: workspace_bytes={workspace_bytes}; expected bytes > 0")
    process_group = _process_group(group)
    known = _process_groups.get(process_group.group_name)
    if known is not None and known() is process_group:
        raise ValueError(
            f"interlace: group {process_group.group_name!r} is set up already; call interlace.destroy first"
        )
    return _set_up(process_group, timeout=timeout, workspace_bytes=workspace_bytes, first_epoch=first_epoch)


def destroy(group: Group = None) -> None:
    """Give a group's symmetric memory back. Local; peers that still call ops of this group raise CollectiveAborted."""
    name = group if isinstance(group, str) else _process_group(group).group_name
    _forget(name)


def _set_up(
    process_group: dist.ProcessGroup, *, timeout: float | None, workspace_bytes: int | None, first_epoch: int
) -> GroupInfo:
    name = process_group.group_name
    _forget(name)
    rank, world_size = dist.get_rank(process_group), process_group.size()
    fallback = ""
    if world_size > 1:
        fallback = symmetric_memory.rendezvous(
            process_group, timeout=timeout, workspace_bytes=workspace_bytes, first_epoch=first_epoch
        )
    if fallback and rank == 0:
        warnings.warn(
            f"interlace: group {name!r} runs on torch.distributed, nothing is fused: {fallback}", stacklevel=4
        )
    info = GroupInfo(name=name, rank=rank, world_size=world_size, fallback=fallback)
    _registry[name] = info
    # the symmetric memory goes when torch drops the process group (destroy_process_group): a later group of the
    # same name must never meet the old one's segments
    _process_groups[name] = weakref.ref(process_group, lambda ref: _forget_if(name, ref))
    return info


@atexit.register
def _forget_all() -> None:
    """Before module globals go: no callback may run into a half-dismantled interpreter."""
    for name in list(_registry):
        _forget(name)


def _forget_if(name: str, ref: weakref.ref) -> None:
    if _process_groups.get(name) is ref:
        _forget(name)


def _forget(name: str) -> None:
    _process_groups.pop(name, None)
    if _registry.pop(name, None) is not None:
        symmetric_memory.release(name)
