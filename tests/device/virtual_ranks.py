"""Several ranks on one GPU: segments and host pages of a whole group, as a provider would set them up."""

from __future__ import annotations

from dataclasses import dataclass

import torch

PAGE_WORDS = 16  # 64 bytes: abort_request, then the failure: state, op, rank, peer, block, want, seen
# csrc/cuda/kernels/segment.h: 64 x 8 arrivals, abort at 512, epoch at 544, 4096 x 8 tile arrivals, 4096 counters
ARRIVAL_WORDS = 512
EPOCH_WORD = 544
TILE_ARRIVALS = slice(576, 576 + 4096 * 8)
CONTROL_WORDS = 576 + 4096 * 9

TIMED_OUT = 1
ABORTED = 2


@dataclass(frozen=True)
class Failure:
    """What a kernel recorded when it left early."""

    state: int
    op: int
    rank: int
    peer: int
    block: int
    want: int
    seen: int


class VirtualRanks:
    """A group of `world_size` ranks on one device. Every call is one launch per rank, or one for all ranks."""

    def __init__(
        self, world_size: int, half_bytes: int, *, timeout: float = 20.0, first_epoch: int = 0
    ) -> None:
        self.world_size = world_size
        self.half_bytes = (half_bytes + 15) // 16 * 16
        self.timeout = timeout
        needed = torch.ops.interlace._device_segment_bytes(self.half_bytes)
        self._memory = torch.zeros(world_size, (needed + 127) // 128 * 32, dtype=torch.int32, device="cuda")
        self._pages = torch.zeros(world_size, PAGE_WORDS, dtype=torch.int32).pin_memory()
        self.reset(first_epoch)

    def reset(self, first_epoch: int = 0) -> None:
        """Start again, as after a failure: nothing may be in flight. Halves are filled with NaN."""
        signed = first_epoch - 2**32 if first_epoch >= 2**31 else first_epoch
        torch.cuda.synchronize()
        self._pages.zero_()
        self._memory.fill_(-1)
        self._memory[:, :CONTROL_WORDS] = 0
        self._memory[:, :ARRIVAL_WORDS] = signed
        self._memory[:, TILE_ARRIVALS] = signed
        self._memory[:, EPOCH_WORD] = signed
        torch.cuda.synchronize()

    def epoch(self, rank: int) -> int:
        """Last epoch that the rank finished."""
        return int(self._memory[rank, EPOCH_WORD].item()) % 2**32

    def failure(self, rank: int) -> Failure:
        """The failure the rank's kernels recorded; state 0 when there is none."""
        torch.cuda.synchronize()
        return Failure(*self._pages[rank, 1:8].tolist())

    def request_abort(self, rank: int) -> None:
        """Make the rank's waiting kernel leave."""
        self._pages[rank, 0] = 1

    def _segments(self) -> list[int]:
        return [row.data_ptr() for row in self._memory]

    def _page_addresses(self, first_rank: int, ranks: int) -> list[int]:
        return [self._pages[first_rank + i].data_ptr() for i in range(ranks)]

    def barrier(self, first_rank: int = 0, ranks: int | None = None) -> None:
        """Launch the barrier of ranks first_rank, first_rank + 1, ... on the current stream."""
        pages = self._page_addresses(first_rank, self.world_size if ranks is None else ranks)
        device = torch.cuda.current_device()
        torch.ops.interlace._device_barrier(self._segments(), pages, first_rank, self.timeout, device)

    def all_reduce(
        self, inputs: list[torch.Tensor], outs: list[torch.Tensor], *, blocks: int, first_rank: int = 0
    ) -> None:
        """Launch the all-reduce of ranks first_rank, first_rank + 1, ... on the current stream."""
        pages = self._page_addresses(first_rank, len(inputs))
        torch.ops.interlace._device_one_shot_all_reduce(
            inputs, outs, self._segments(), pages, self.half_bytes, first_rank, blocks, self.timeout
        )
