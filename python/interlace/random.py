"""Random numbers over a group: ranks draw their own where they hold different data, the same where they hold the same.

Everything comes from torch's default generators, which are seeded alike on the ranks of a group: a sharded region
draws one number from the default generator, the same on all ranks, and continues from a seed made of it and the rank;
behind the region the default generator goes on from that one draw, whatever was used inside. So ranks stay in step
although they hold shards of unequal size, and activation checkpointing (preserve_rng_state) repeats the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from .groups import Group, resolve

__all__ = ["ShardedRandom", "in_step", "region", "synchronize"]

_MASK32 = 0xFFFFFFFF
REPLICATED = 0  # the stream of a replicated region; those of ranks are 1, 2, ..


def stream_seed(number: int, stream: int) -> int:
    """Seed of a stream: `number` above, and its hash with the stream below, as CPU generators use 32 bits only."""
    mixed = (number * 0x9E3779B1 + stream * 0x85EBCA6B) & _MASK32
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):  # lowbias32 (C. Wellons, 2018)
        mixed = ((mixed ^ mixed >> shift) * factor) & _MASK32
    return (number & 0x7FFFFFFF) << 32 | mixed


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[
            torch.cuda.current_device() if device.index is None else device.index
        ]
    return torch.default_generator


def _draw(generator: torch.Generator) -> int:
    number = torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=generator)
    return int(number) & 0x7FFFFFFF


class ShardedRandom:
    """A region without a `with`: `enter` and `leave` stand in the hooks of two modules.

    `enter` while it is open, and `leave` while it is not, do nothing. Left open by an exception, it puts the default
    generator back at the next `enter`, unless somebody else did (activation checkpointing does).
    """

    def __init__(self, group: Group = None) -> None:
        info = resolve(group)
        self.group_name, self.rank, self.world_size = info.name, info.rank, info.world_size
        self._open: tuple[torch.Generator, Tensor, int] | None = None

    def enter(self, device: torch.device) -> None:
        """From here on the default generator of `device` gives numbers of this rank's own."""
        if self.world_size == 1 or self._still_open():
            return
        generator = _generator(device)
        seed = stream_seed(_draw(generator), self.rank + 1)
        self._open = (generator, generator.get_state(), seed)
        generator.manual_seed(seed)

    def leave(self) -> None:
        """The default generator goes on as on all other ranks."""
        if self._still_open() and self._open is not None:
            self._open[0].set_state(self._open[1])
        self._open = None

    def _still_open(self) -> bool:
        return self._open is not None and self._open[0].initial_seed() == self._open[2]

    def __getstate__(self) -> dict[str, Any]:
        """Closed: an open region belongs to a forward, not to the layer."""
        return {**self.__dict__, "_open": None}


@contextmanager
def region(kind: str, *, group: Group = None, device: torch.device | str = "cpu") -> Iterator[None]:
    """Inside, torch's default generator of `device` gives this rank's own numbers ("sharded") or the same on all
    ranks ("replicated").

    sharded: local; costs one draw of the default generator, the same on every rank. replicated: collective; rank 0
    draws and tells the others, so ranks agree inside even where they were not seeded alike. The default generator
    comes out one draw further, whatever was used inside. ValueError for another kind.
    """
    if kind not in ("sharded", "replicated"):
        raise ValueError(f'interlace.random.region: kind={kind!r}; expected "sharded" or "replicated"')
    if kind == "sharded":
        own = ShardedRandom(group)
        own.enter(torch.device(device))
        try:
            yield
        finally:
            own.leave()
        return
    generator = _generator(torch.device(device))
    number = _from_rank_0(_draw(generator), group)
    state = generator.get_state()
    generator.manual_seed(stream_seed(number, REPLICATED))
    try:
        yield
    finally:
        generator.set_state(state)


def _from_rank_0(value: Any, group: Group) -> Any:
    info = resolve(group)
    if info.world_size == 1:
        return value
    values = [value]
    process_group = _resolve_process_group(info.name)
    dist.broadcast_object_list(values, dist.get_global_rank(process_group, 0), group=process_group)
    return values[0]


def _states() -> list[Tensor]:
    generators = [torch.default_generator]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        generators.append(_generator(torch.device("cuda")))
    return [generator.get_state() for generator in generators]


def in_step(group: Group = None) -> bool:
    """True when the default generators of all ranks of the group would give the same numbers. Collective."""
    info = resolve(group)
    if info.world_size == 1:
        return True
    mine = [state.numpy().tobytes() for state in _states()]
    everyone: list[Any] = [None] * info.world_size
    dist.all_gather_object(everyone, mine, group=_resolve_process_group(info.name))
    return all(states == everyone[0] for states in everyone)


def synchronize(group: Group = None) -> None:
    """Put the default generators of all ranks of the group where rank 0's are. Collective.

    Call it where ranks were seeded by their number, before training a split model that has dropout.
    """
    states = _from_rank_0(_states(), group)
    generators = [torch.default_generator]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        generators.append(_generator(torch.device("cuda")))
    for generator, state in zip(generators, states, strict=False):
        generator.set_state(state)
