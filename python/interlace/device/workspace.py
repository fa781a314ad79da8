"""What one launch is told about its group, and the pinned host page through which a kernel reports a failure."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Protocol

import torch

from ..errors import CollectiveAborted, CollectiveTimeout

__all__ = ["HostPage", "Native", "Tail", "Workspace", "device_ops", "raise_failure"]

Tail = tuple[list[int], list[int], int, int, int, float]

_ALIGNMENT = 64  # bytes; csrc/cuda/kernels/segment.h: HostPage
_TIMED_OUT = 1  # FailureState::kTimedOut


class Native(Protocol):
    """The ops of the CUDA library that this package calls; tests put something else in their place."""

    def segment_bytes(self, half_bytes: int) -> int:
        """Bytes of a segment whose halves hold half_bytes each."""

    def page_layout(self) -> tuple[int, int]:
        """Bytes of a host page, and where in it the state of the failure lies."""

    def failure(self, page: int) -> tuple[int, str]:
        """FailureState and text of what is recorded in the page at that address."""

    def request_abort(self, page: int) -> None:
        """Make the waiting kernels of the page's rank leave; they tell the peers."""

    def abort(self, tail: Tail, device: int) -> None:
        """Set the abort word of every rank, by copies on a stream of their own."""

    def read_addresses(self, address: int, count: int, device: int) -> list[int]:
        """Addresses that lie in device memory."""


class _DeviceOps:
    """Native, by the ops of interlace_cuda.so."""

    def segment_bytes(self, half_bytes: int) -> int:
        return int(torch.ops.interlace._device_segment_bytes(half_bytes))

    def page_layout(self) -> tuple[int, int]:
        nbytes, state_offset = torch.ops.interlace._device_page_layout()
        return nbytes, state_offset

    def failure(self, page: int) -> tuple[int, str]:
        state, text = torch.ops.interlace._device_failure(page)
        return state, text

    def request_abort(self, page: int) -> None:
        torch.ops.interlace._device_request_abort(page)

    def abort(self, tail: Tail, device: int) -> None:
        torch.ops.interlace._device_abort(*tail, device)

    def read_addresses(self, address: int, count: int, device: int) -> list[int]:
        return list(torch.ops.interlace._device_read_addresses(address, count, device))


device_ops: Native = _DeviceOps()


class HostPage:
    """One rank's page in pinned host memory: the kernel writes a failure into it, the host an abort request."""

    def __init__(self, native: Native, *, pinned: bool = True) -> None:
        self._native = native
        nbytes, state_offset = native.page_layout()
        # room to align: the allocator of pinned memory promises nothing
        self._memory = torch.zeros(nbytes + _ALIGNMENT, dtype=torch.uint8, pin_memory=pinned)
        self.address = -(-self._memory.data_ptr() // _ALIGNMENT) * _ALIGNMENT
        self._state = ctypes.c_uint32.from_address(self.address + state_offset)

    @property
    def failed(self) -> bool:
        """Has a kernel recorded a failure? One load from host memory."""
        return self._state.value != 0

    def failure(self) -> tuple[int, str]:
        """FailureState (0 for none) and what happened, in words."""
        return self._native.failure(self.address)

    def request_abort(self) -> None:
        """Make this rank's waiting kernels leave. They tell the peers."""
        self._native.request_abort(self.address)

    def clear(self) -> None:
        """Forget the failure; only while no kernel of the group runs."""
        self._memory.zero_()


@dataclass(frozen=True)
class Workspace:
    """The memory of one group on one stream, as this rank's launches see it. Addresses are numbers, sizes bytes.

    segments: every rank's segment, at addresses of this device. pages: the host page of this rank, or those of all
    ranks when they are virtual ranks on one device. multicast: address through which a store reaches every segment,
    0 where there is none. timeout: seconds of one wait.
    """

    group_name: str
    device: int
    rank: int
    world_size: int
    half_bytes: int
    segments: tuple[int, ...]
    pages: tuple[int, ...]
    multicast: int
    timeout: float
    host_pages: tuple[HostPage, ...] = ()

    @property
    def tail(self) -> Tail:
        """The group's arguments of every `_device_*` op, in the schemas' order."""
        return (
            list(self.segments),
            list(self.pages),
            self.multicast,
            self.half_bytes,
            self.rank,
            self.timeout,
        )

    @property
    def failed(self) -> bool:
        """Has a kernel of this workspace recorded a failure?"""
        return any(page.failed for page in self.host_pages)


def raise_failure(workspace: Workspace) -> None:
    """Raise CollectiveTimeout or CollectiveAborted with what the first failed kernel recorded; nothing if none did."""
    for page in workspace.host_pages:
        state, text = page.failure()
        if state == 0:
            continue
        where = f"group {workspace.group_name!r}, {workspace.world_size} ranks"
        if state == _TIMED_OUT:
            raise CollectiveTimeout(
                f"{where}: {text} (waited {workspace.timeout:g} s); is that rank still running? INTERLACE_TIMEOUT "
                "sets the limit. Results of this group since then are not valid; call interlace.destroy and start again"
            )
        raise CollectiveAborted(
            f"{where}: {text}. Results of this group since then are not valid; call interlace.destroy and start again"
        )
