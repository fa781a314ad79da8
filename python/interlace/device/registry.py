"""The groups whose GPU memory is set up in this process, by name."""

from __future__ import annotations

from pathlib import Path

import torch
from torch._C._autograd import DeviceType
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed.distributed_c10d import _resolve_process_group

from .. import symmetric_memory
from .._native import CUDA_LIBRARY
from ..config import settings
from .peers import Member, Peers, why_not
from .regions import Regions
from .workspace import Workspace, device_ops, raise_failure

__all__ = ["abort", "check", "check_group", "destroy", "multicast", "unavailable", "workspace"]

_groups: dict[str, Regions] = {}
_devices: dict[str, int] = {}
_members: dict[str, list[Member]] = {}


def unavailable(group_name: str, device: torch.device) -> str:
    """Why the fused kernels cannot serve this group on `device`; "" when they can. Equal on all ranks.

    Collective at the first call for a group, answered from memory afterwards.
    """
    return why_not(_introduced(group_name, device))


def multicast(group_name: str, device: torch.device) -> bool:
    """Do all GPUs of the group offer multicast (NVLS)? Collective like `unavailable`."""
    return all(member.multicast for member in _introduced(group_name, device))


def workspace(
    group_name: str, device: torch.device, half_bytes: int, *, timeout: float | None = None
) -> Workspace:
    """The workspace of the group on the current stream of `device`, with halves of at least half_bytes.

    half_bytes is the same on every rank. Collective when memory has to be set up: at the first call on a stream and
    when half_bytes grows. timeout: seconds of one wait in a kernel, taken at the group's first call.

    Raises CollectiveTimeout or CollectiveAborted if an earlier kernel of the group failed, ValueError if the group
    cannot share memory or moved to another device, RuntimeError if memory would have to be set up while a CUDA graph
    is captured.
    """
    if half_bytes < 0:
        raise ValueError(f"interlace: half_bytes={half_bytes}; expected bytes >= 0")
    index = _index(device)
    regions = _groups.get(group_name)
    if regions is None:
        regions = _set_up(group_name, torch.device("cuda", index), timeout)
    if _devices[group_name] != index:
        raise ValueError(
            f"interlace: group {group_name!r} works on cuda:{_devices[group_name]} in this process, got a tensor on "
            f"cuda:{index}; move it, or call interlace.destroy first"
        )
    check_group(group_name)
    stream = torch.cuda.current_stream(index)
    capturing = torch.cuda.is_current_stream_capturing()
    return regions.workspace(stream.cuda_stream, half_bytes, capturing=capturing)


def check(workspace: Workspace) -> None:
    """Raise CollectiveTimeout or CollectiveAborted if a kernel of this workspace recorded a failure. No waiting."""
    if workspace.failed:
        raise_failure(workspace)


def check_group(group_name: str) -> None:
    """`check` for every workspace of the group; nothing for a group without GPU memory."""
    regions = _groups.get(group_name)
    if regions is not None:
        for each in regions.workspaces():
            check(each)


def abort(group_name: str) -> None:
    """Make the group's kernels leave, on every rank: peers raise CollectiveAborted. For failures of this rank alone.

    The group stays aborted until it is destroyed. Nothing for a group without GPU memory.
    """
    regions = _groups.get(group_name)
    if regions is not None:
        for each in regions.workspaces():
            device_ops.abort(each.tail, each.device)


def destroy(group_name: str) -> None:
    """Give the group's GPU memory back. Local: kernels of this rank have ended, peers that still wait time out."""
    _members.pop(group_name, None)
    device = _devices.pop(group_name, None)
    regions = _groups.pop(group_name, None)
    if regions is not None:
        if device is not None:
            torch.cuda.synchronize(device)
        regions.close()


def _introduced(group_name: str, device: torch.device) -> list[Member]:
    members = _members.get(group_name)
    if members is None:
        members = symmetric_memory.exchange(_resolve_process_group(group_name), _member(device))
        _members[group_name] = members
        # a later group of the same name must not meet what is remembered of this one
        symmetric_memory.on_release(group_name, lambda: destroy(group_name))
    return members


def _set_up(group_name: str, device: torch.device, timeout: float | None) -> Regions:
    reason = unavailable(group_name, device)
    if reason:
        raise ValueError(
            f"interlace: group {group_name!r} cannot run the fused kernels: {reason}; use backend auto or reference"
        )
    group = _resolve_process_group(group_name)
    provider = Peers(group=group, device=device.index, timeout=timeout or settings.timeout, native=device_ops)
    regions = Regions(group_name, provider, least=settings.workspace_bytes // 2)
    _groups[group_name] = regions
    _devices[group_name] = device.index
    return regions


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _member(device: torch.device) -> Member:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    if device.type != "cuda" or not torch.cuda.is_available():
        return Member(boot, "", (0, 0), f"expected a CUDA device, got {device}")
    properties = torch.cuda.get_device_properties(device)
    refusal = ""
    if not hasattr(torch.ops.interlace, "_device_segment_bytes"):
        found = "does not load under this torch" if CUDA_LIBRARY.exists() else "is not built"
        refusal = f"interlace_cuda.so {found}; install with nvcc and a CUDA build of torch"
    here = _index(device)
    return Member(
        host=boot,
        device_uuid=str(properties.uuid),
        capability=(properties.major, properties.minor),
        refusal=refusal,
        multicast=_SymmetricMemory.has_multicast_support(DeviceType.CUDA, here),
        unreachable=frozenset(
            str(torch.cuda.get_device_properties(other).uuid)
            for other in range(torch.cuda.device_count())
            if other != here and not torch.cuda.can_device_access_peer(here, other)
        ),
    )
