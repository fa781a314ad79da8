"""Provider for several ranks on one GPU in one process: how one GPU runs and measures every kernel.

All segments lie in one allocation. Every rank is launched on a stream of its own, with a grid of at most a
`world_size`th of the multiprocessors: ranks wait for each other, so all their blocks must be resident at once. For the
same reason set CUDA_DEVICE_MAX_CONNECTIONS=32 (a hardware queue for each stream) and CUDA_MODULE_LOADING=EAGER
(loading a kernel may wait for those that run) before CUDA starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from .peers import MAX_RANKS
from .workspace import HostPage, Native, Workspace, device_ops, raise_failure

__all__ = ["VirtualRanks"]

_ALIGNMENT = 128


class VirtualRanks:
    """A group of `world_size` ranks on one device.

    half_bytes: staging per half and rank. timeout: seconds of one wait. device: index of the GPU. Raises ValueError
    for a world size the kernels do not serve.
    """

    def __init__(
        self,
        world_size: int,
        half_bytes: int,
        *,
        timeout: float = 20.0,
        device: int = 0,
        native: Native = device_ops,
        memory_device: str = "cuda",
    ) -> None:
        if not 1 <= world_size <= MAX_RANKS:
            raise ValueError(
                f"VirtualRanks: world_size={world_size}; the kernels serve 1 to {MAX_RANKS} ranks"
            )
        if half_bytes < 0:
            raise ValueError(f"VirtualRanks: half_bytes={half_bytes}; expected bytes >= 0")
        self.world_size = world_size
        self.device = device
        half_bytes = -(-half_bytes // _ALIGNMENT) * _ALIGNMENT
        stride = -(-native.segment_bytes(half_bytes) // _ALIGNMENT) * _ALIGNMENT
        on_gpu = memory_device == "cuda"
        where = torch.device("cuda", device) if on_gpu else torch.device(memory_device)
        self._memory = torch.zeros(world_size * stride + _ALIGNMENT, dtype=torch.uint8, device=where)
        self._first = -self._memory.data_ptr() % _ALIGNMENT  # bytes before the first segment
        self._stride = stride
        self._pages = tuple(HostPage(native, pinned=on_gpu) for _ in range(world_size))
        self._control_bytes = native.segment_bytes(0)
        start = self._memory.data_ptr() + self._first
        self.workspace = Workspace(
            group_name=f"{world_size} virtual ranks",
            device=device,
            rank=0,
            world_size=world_size,
            half_bytes=half_bytes,
            segments=tuple(start + rank * stride for rank in range(world_size)),
            pages=tuple(page.address for page in self._pages),
            multicast=0,
            timeout=timeout,
            host_pages=self._pages,
        )
        self.workspaces = tuple(self._of(rank) for rank in range(world_size))
        self.streams = tuple(torch.cuda.Stream(device) for _ in range(world_size)) if on_gpu else ()

    def _of(self, rank: int) -> Workspace:
        return replace(self.workspace, rank=rank, host_pages=(self._pages[rank],))

    @contextmanager
    def ranks(self) -> Iterator[Iterator[Workspace]]:
        """Iterate over the ranks' workspaces, each under its own stream; the caller's stream waits for all at the end.

        `with ranks.ranks() as each: for workspace in each: launch(workspace)`. Works under graph capture.
        """
        if not self.streams:
            yield iter(self.workspaces)
            return
        caller = torch.cuda.current_stream(self.device)
        yield self._on_streams(caller)
        for stream in self.streams:
            caller.wait_stream(stream)

    def _on_streams(self, caller: torch.cuda.Stream) -> Iterator[Workspace]:
        for workspace, stream in zip(self.workspaces, self.streams, strict=True):
            stream.wait_stream(caller)
            with torch.cuda.stream(stream):
                yield workspace

    def control(self, rank: int) -> torch.Tensor:
        """The control words of a rank, uint8, a view. Tests set epochs through it."""
        begin = self._first + rank * self._stride
        return self._memory[begin : begin + self._control_bytes]

    def halves(self, rank: int) -> torch.Tensor:
        """Both halves of a rank's staging, uint8, a view."""
        begin = self._first + rank * self._stride + self._control_bytes
        return self._memory[begin : begin + 2 * self.workspace.half_bytes]

    def reset(self) -> None:
        """Start again, as after a failure. Waits for the device; halves are filled with 0xff, a NaN in every dtype."""
        if self.streams:
            torch.cuda.synchronize(self.device)
        for rank, page in enumerate(self._pages):
            page.clear()
            self.control(rank).zero_()
            self.halves(rank).fill_(0xFF)
        if self.streams:
            torch.cuda.synchronize(self.device)

    def check(self) -> None:
        """Raise CollectiveTimeout or CollectiveAborted if a kernel of any rank recorded a failure."""
        raise_failure(self.workspace)

    def failure(self, rank: int) -> tuple[int, str]:
        """FailureState and text of what the rank's kernels recorded; waits for the device."""
        if self.streams:
            torch.cuda.synchronize(self.device)
        return self._pages[rank].failure()

    def request_abort(self, rank: int) -> None:
        """Make the rank's waiting kernels leave."""
        self._pages[rank].request_abort()
