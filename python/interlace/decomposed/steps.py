"""Pairwise exchanges: who sends what to whom in which step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

__all__ = ["Peers", "Transfer"]


class Transfer:
    """What is in flight. `wait` makes the current stream (on CPU: this thread) wait for it."""

    def __init__(self, works: Sequence[dist.Work], keep: Sequence[Tensor]) -> None:
        self._works = list(works)
        self._keep = list(keep)  # buffers live until the transfer is over

    def wait(self) -> None:
        """After this the received bytes may be read and the sent ones overwritten, in stream order."""
        for work in self._works:
            work.wait()
        self._works.clear()
        self._keep.clear()


class Peers:
    """The ranks of a group as one of them sees it."""

    def __init__(self, group_name: str) -> None:
        self.group = _resolve_process_group(group_name)
        self.rank, self.world_size = self.group.rank(), self.group.size()

    def steps(self) -> list[tuple[int, int]]:
        """(rank to send to, rank to receive from) of each step; every pair of ranks meets once."""
        return [
            ((self.rank + i) % self.world_size, (self.rank - i) % self.world_size)
            for i in range(1, self.world_size)
        ]

    def exchange(self, sends: Sequence[Tensor], to: int, receives: Sequence[Tensor], source: int) -> Transfer:
        """Start one step. Both sides know every size, so empty parts are not sent. Collective over the group."""
        ops = []
        for send in sends:
            if send.numel():
                ops.append(dist.P2POp(dist.isend, _bytes(send), self._global(to), self.group))
        for receive in receives:
            if receive.numel():
                ops.append(dist.P2POp(dist.irecv, _bytes(receive), self._global(source), self.group))
        works = dist.batch_isend_irecv(ops) if ops else []
        return Transfer(works, [*sends, *receives])

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank)


def _bytes(rows: Tensor) -> Tensor:
    """fp8 as bytes: not every backend knows the type, and nothing is added on the way."""
    return rows.view(torch.uint8) if rows.itemsize == 1 else rows
