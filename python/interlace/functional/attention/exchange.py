"""How keys and values get from rank to rank, and their gradients back.

Every exchange has `blocks()` for the forward pass, `gradient_blocks()` and then `gradients()` for the backward pass.
`Shared`: on one host a rank reads its peers' keys and values in place and adds gradients into their owner's, step by
step, so that nothing is copied twice and sums have one order. `Ring`: elsewhere blocks travel by point-to-point
messages, the next one while the present one is worked on (Liu et al., arXiv 2310.01889). `Gathered`: all blocks are
fetched one by one, work starts on the own one, and gradients are summed in one reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from ..._native import _C as native
from ...groups import GroupInfo
from ...ops import OPS
from ...windows import Window, window
from .problem import Problem

__all__ = ["Gathered", "Ring", "Shared", "exchange_of"]


def exchange_of(
    algorithm: str, problem: Problem, info: GroupInfo, k: Tensor, v: Tensor, wide: torch.dtype
) -> Shared | Ring | Gathered:
    """The exchange of "ring" or "all_gather"; `wide` is the dtype of sums of gradients. Used right after `agree`."""
    in_place = info.world_size == 1 or (not k.is_cuda and native.is_fused("all_reduce", info.name))
    if algorithm == "all_gather":
        return Gathered(problem, info, k, v, wide, in_place)
    return Shared(problem, info, k, v, wide) if in_place else Ring(problem, info, k, v, wide)


class Shared:
    """Blocks in a window of the group: [keys, values | gradients of both, `wide`]."""

    def __init__(self, problem: Problem, info: GroupInfo, k: Tensor, v: Tensor, wide: torch.dtype) -> None:
        self._problem, self._info, self._own = problem, info, (k, v)
        self._shape, self._dtype, self._wide = (2, *k.shape), k.dtype, wide
        self._gap = -(-2 * k.numel() * k.dtype.itemsize // 64) * 64
        self._window: Window | None = None

    def _open(self, with_gradients: bool) -> Window:
        size = self._gap + (2 * self._own[0].numel() * self._wide.itemsize if with_gradients else 0)
        return window(self._info, size)

    def _publish(self, opened: Window) -> None:
        """Into the window with what peers read. Whoever comes here knows (from `agree`) that all are done reading."""
        rank = self._info.rank
        if self._problem.readers(rank):
            mine = opened.tensor(rank, 0, self._shape, self._dtype)
            mine[0].copy_(self._own[0])
            mine[1].copy_(self._own[1])

    def _barrier(self) -> None:
        OPS.all_reduce(torch.zeros(1), self._info.name)

    def blocks(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(peer, k, v) in ring order; the own block first, before any waiting."""
        rank = self._info.rank
        if self._info.world_size == 1:
            yield rank, *self._own
            return
        opened = self._open(with_gradients=False)
        self._publish(opened)
        yield rank, *self._own
        self._barrier()
        for peer in self._problem.peers(rank)[1:]:
            if self._problem.tiles(rank, peer):
                block = opened.tensor(peer, 0, self._shape, self._dtype)
                yield peer, block[0], block[1]

    def gradient_blocks(self) -> Iterator[tuple[int, Tensor, Tensor, Tensor, Tensor]]:
        """(peer, k, v, grad_k, grad_v): add to the last two. One rank at a time works on a block, in ring order."""
        rank, world_size = self._info.rank, self._info.world_size
        if world_size == 1:
            self._sums = torch.zeros(self._shape, dtype=self._wide, device=self._own[0].device)
            yield rank, *self._own, self._sums[0], self._sums[1]
            return
        opened = self._open(with_gradients=True)
        self._publish(opened)
        self._sums = opened.tensor(rank, self._gap, self._shape, self._wide).zero_()
        yield rank, *self._own, self._sums[0], self._sums[1]
        for peer in self._problem.peers(rank)[1:]:
            self._barrier()
            if self._problem.tiles(rank, peer):
                block = opened.tensor(peer, 0, self._shape, self._dtype)
                sums = opened.tensor(peer, self._gap, self._shape, self._wide)
                yield peer, block[0], block[1], sums[0], sums[1]
        self._barrier()

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Gradients of the own keys and values, after all `gradient_blocks`."""
        grad_k, grad_v = self._sums
        return grad_k.to(self._dtype, copy=True), grad_v.to(self._dtype, copy=True)


class Ring:
    """Blocks sent around by torch.distributed: to the next rank, from the one before."""

    def __init__(self, problem: Problem, info: GroupInfo, k: Tensor, v: Tensor, wide: torch.dtype) -> None:
        self._problem, self._info = problem, info
        self._block, self._wide = torch.stack([k, v]), wide
        self._group = _resolve_process_group(info.name)
        self._next = dist.get_global_rank(self._group, (info.rank + 1) % info.world_size)
        self._before = dist.get_global_rank(self._group, (info.rank - 1) % info.world_size)

    def _travels(self, step: int, rank: int) -> bool:
        """Whether what `rank` holds at `step` is wanted by it or by a rank behind it in the ring."""
        owner = (rank - step) % self._info.world_size
        later = range(step, self._info.world_size)
        return any(self._problem.tiles((owner + s) % self._info.world_size, owner) for s in later)

    def _start(self, step: int, block: Tensor) -> tuple[list[dist.Work], Tensor]:
        """Send the block of `step` on and receive that of `step + 1`, where somebody still wants it."""
        rank, world_size = self._info.rank, self._info.world_size
        incoming = torch.empty_like(block)
        messages = []
        if self._travels(step + 1, (rank + 1) % world_size):
            messages.append(dist.P2POp(dist.isend, block, self._next, self._group))
        if self._travels(step + 1, rank):
            messages.append(dist.P2POp(dist.irecv, incoming, self._before, self._group))
        return (dist.batch_isend_irecv(messages) if messages else []), incoming

    def blocks(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(peer, k, v) in ring order; the next block is under way while the caller works on one."""
        block = self._block
        for step, peer in enumerate(self._problem.peers(self._info.rank)):
            last = step == self._info.world_size - 1
            works, incoming = ([], block) if last else self._start(step, block)
            if self._problem.tiles(self._info.rank, peer):
                yield peer, block[0], block[1]
            for work in works:
                work.wait()
            block = incoming

    def gradient_blocks(self) -> Iterator[tuple[int, Tensor, Tensor, Tensor, Tensor]]:
        """(peer, k, v, grad_k, grad_v): add to the last two. The gradients follow their block one step later."""
        sums = torch.zeros(self._block.shape, dtype=self._wide, device=self._block.device)
        block = self._block
        for step, peer in enumerate(self._problem.peers(self._info.rank)):
            last = step == self._info.world_size - 1
            works, incoming = ([], block) if last else self._start(step, block)
            if self._problem.tiles(self._info.rank, peer):
                yield peer, block[0], block[1], sums[0], sums[1]
            for work in works:
                work.wait()
            block = incoming
            arriving = torch.empty_like(sums)
            moves = [
                dist.P2POp(dist.isend, sums, self._next, self._group),
                dist.P2POp(dist.irecv, arriving, self._before, self._group),
            ]
            for work in dist.batch_isend_irecv(moves):
                work.wait()
            sums = arriving
        self._sums = sums

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Gradients of the own keys and values, after all `gradient_blocks`."""
        return self._sums[0].to(self._block.dtype), self._sums[1].to(self._block.dtype)


class Gathered:
    """All blocks on every rank: read in place on one host, else sent by one broadcast each."""

    def __init__(
        self, problem: Problem, info: GroupInfo, k: Tensor, v: Tensor, wide: torch.dtype, in_place: bool
    ) -> None:
        self._problem, self._info, self._wide, self._dtype = problem, info, wide, k.dtype
        self._shared = Shared(problem, info, k, v, wide) if in_place else None
        self._own = (k, v)

    def blocks(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(peer, k, v), the own block first, before any waiting."""
        if self._shared is not None:
            yield from self._shared.blocks()
            return
        rank, group = self._info.rank, _resolve_process_group(self._info.name)
        wanted = [owner for owner in range(self._info.world_size) if self._problem.readers(owner)]
        block = torch.stack(self._own)
        blocks = {owner: block if owner == rank else torch.empty_like(block) for owner in wanted}
        works = {
            owner: dist.broadcast(blocks[owner], dist.get_global_rank(group, owner), group, async_op=True)
            for owner in wanted
        }
        yield rank, *self._own
        for peer in wanted:
            works[peer].wait()
            if peer != rank and self._problem.tiles(rank, peer):
                yield peer, blocks[peer][0], blocks[peer][1]

    def gradient_blocks(self) -> Iterator[tuple[int, Tensor, Tensor, Tensor, Tensor]]:
        """(peer, k, v, grad_k, grad_v): add to the last two."""
        shape = (self._info.world_size, 2, *self._own[0].shape)
        self._sums = torch.zeros(shape, dtype=self._wide, device=self._own[0].device)
        for peer, k, v in self.blocks():
            yield peer, k, v, self._sums[peer, 0], self._sums[peer, 1]

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Gradients of the own keys and values, after all `gradient_blocks`; ranks are summed in rank order."""
        sums = self._sums
        if self._info.world_size > 1:
            sums = OPS.reduce_scatter(sums, 0, self._info.name)
        return sums[0, 0].to(self._dtype), sums[0, 1].to(self._dtype)
