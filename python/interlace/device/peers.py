"""Provider for one GPU per process: torch's symmetric memory, whichever of its back ends (CUDA or NCCL) is set."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..symmetric_memory import agreed, exchange
from .workspace import HostPage, Native, Workspace

__all__ = ["Member", "Peers", "Torch", "TorchMemory", "segment_addresses", "why_not"]

MAX_RANKS = 8  # kMaxRanks of csrc/core/signal.h
_ALIGNMENT = 128  # bytes; csrc/cuda/kernels/segment.h: SegmentControl
_LEAST_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Member:
    """What a rank tells the others before memory is shared.

    refusal: why it cannot take part, empty if it can. unreachable: GPUs whose memory its own GPU cannot access.
    """

    host: str
    device_uuid: str
    capability: tuple[int, int]
    refusal: str = ""
    multicast: bool = False
    unreachable: frozenset[str] = frozenset()


def why_not(members: list[Member]) -> str:
    """Why these ranks cannot share GPU memory; "" when they can. The same answer on every rank."""
    if len(members) > MAX_RANKS:
        return f"{len(members)} ranks; the fused kernels serve up to {MAX_RANKS}"
    for rank, member in enumerate(members):
        if member.refusal:
            return f"rank {rank}: {member.refusal}"
        if member.capability < _LEAST_CAPABILITY:
            major, minor = member.capability
            return f"rank {rank}: compute capability {major}.{minor}; the fused kernels need 8.0 or later"
    if len({m.capability for m in members}) > 1:
        return "the ranks' GPUs have different compute capabilities"
    hosts = {m.host for m in members}
    if len(hosts) > 1:
        return f"the ranks are on {len(hosts)} hosts"
    seen: dict[str, int] = {}
    for rank, member in enumerate(members):
        other = seen.setdefault(member.device_uuid, rank)
        if other != rank:
            return f"ranks {other} and {rank} use the same GPU"
    for rank, member in enumerate(members):
        for uuid in sorted(member.unreachable & seen.keys()):
            return f"the GPUs of ranks {rank} and {seen[uuid]} cannot access each other's memory"
    return ""


def segment_addresses(bases: list[int], offset: int, rank: int, own: int) -> tuple[list[int], int]:
    """Addresses of all segments from what a rendezvous reports, and the offset that was added.

    Some back ends report where the allocation begins, some where the tensor does: this rank's own entry tells which.
    Raises RuntimeError when it is neither.
    """
    for added in (0, offset):
        if bases[rank] + added == own:
            addresses = [base + added for base in bases]
            break
    else:
        raise RuntimeError(
            f"torch's symmetric memory reports {bases[rank]:#x} + {offset} for a tensor at {own:#x}; this version of "
            "torch lays it out in a way interlace does not know"
        )
    for peer, address in enumerate(addresses):
        if address % _ALIGNMENT:
            raise RuntimeError(
                f"the segment of rank {peer} at {address:#x} is not aligned to {_ALIGNMENT} bytes"
            )
    return addresses, added


class TorchMemory:
    """The few calls of torch that the provider makes on a device; tests put something else in their place."""

    def allocate(self, nbytes: int, device: int) -> Tensor:
        """uint8 [nbytes] that a rendezvous can share."""
        import torch.distributed._symmetric_memory as symmetric

        return symmetric.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", device))

    def rendezvous(self, tensor: Tensor, group: dist.ProcessGroup) -> Any:
        """torch's handle: buffer_ptrs, multicast_ptr, offset. Collective."""
        import torch.distributed._symmetric_memory as symmetric

        return symmetric.rendezvous(tensor, group)

    def synchronize(self, device: int) -> None:
        """Wait for all work on the device."""
        torch.cuda.synchronize(device)


Torch = TorchMemory()


def _multicast(handle: Any) -> int:
    try:
        return int(handle.multicast_ptr or 0)
    except RuntimeError:  # a back end without the notion of it
        return 0


@dataclass
class _PeerRegion:
    """One rendezvous: the tensor and torch's handle live as long as kernels may use them."""

    workspace: Workspace
    keep: tuple[Any, ...]

    def close(self) -> None:
        self.keep = ()


@dataclass(frozen=True)
class Peers:
    """Regions of a process group, one GPU per rank.

    group: its ranks must all call. timeout: seconds of one wait in a kernel.
    """

    group: dist.ProcessGroup
    device: int
    timeout: float
    native: Native
    memory: TorchMemory = Torch
    pinned: bool = True

    def open(self, half_bytes: int) -> _PeerRegion:
        """New symmetric memory, zero on every rank on return. Raises RuntimeError on every rank if one cannot."""
        name, rank, world_size = self.group.group_name, self.group.rank(), self.group.size()
        region: list[_PeerRegion] = []
        with agreed(self.group, name):
            nbytes = -(-self.native.segment_bytes(half_bytes) // _ALIGNMENT) * _ALIGNMENT
            tensor = self.memory.allocate(nbytes, self.device)
            tensor.zero_()
            # a peer signals as soon as it knows the address
            self.memory.synchronize(self.device)
        with agreed(self.group, name):
            handle = self.memory.rendezvous(tensor, self.group)
            offset = int(getattr(handle, "offset", 0))
            addresses, added = segment_addresses(self._bases(handle), offset, rank, tensor.data_ptr())
            multicast = _multicast(handle)
            page = HostPage(self.native, pinned=self.pinned)
            workspace = Workspace(
                group_name=name,
                device=self.device,
                rank=rank,
                world_size=world_size,
                half_bytes=half_bytes,
                segments=tuple(addresses),
                pages=(page.address,),
                multicast=multicast + added if multicast else 0,
                timeout=self.timeout,
                host_pages=(page,),
            )
            region.append(_PeerRegion(workspace, (tensor, handle)))
        opened = region[0]
        if not all(exchange(self.group, opened.workspace.multicast != 0)):
            opened.workspace = replace(opened.workspace, multicast=0)
        return opened

    def _bases(self, handle: Any) -> list[int]:
        """Every rank's address; a back end that tells them to the device only is read from there."""
        bases = [int(base) for base in handle.buffer_ptrs]
        if len(bases) == self.group.size() and all(bases):
            return bases
        return self.native.read_addresses(int(handle.buffer_ptrs_dev), self.group.size(), self.device)

    def agree(self, decision: Any) -> list[Any]:
        """Every rank's decision. This device is idle by then: memory may be unmapped when all have answered."""
        self.memory.synchronize(self.device)
        return exchange(self.group, decision)
