"""Which memory a call uses: one region per (group, stream), grown when a call needs more. No GPU is touched here.

Two launches of one group may be in flight at once on two streams, so streams never share a region: epochs count the
launches of one stream. Every decision here is a function of the order of calls, which is the same on every rank, and
each new region is agreed on before memory is taken, so that a rank that went another way is found and named.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from .workspace import Workspace

__all__ = ["MAX_REGIONS", "Provider", "Region", "Regions", "grown"]

MAX_REGIONS = 16  # of one group: each costs a segment on every rank


class Region(Protocol):
    """Symmetric memory of one region; `close` unmaps it."""

    workspace: Workspace

    def close(self) -> None:
        """Give the memory back. Local; no kernel of any rank uses it any more."""


class Provider(Protocol):
    """Where regions come from. Both calls are collective."""

    def open(self, half_bytes: int) -> Region:
        """New memory whose control words are zero on every rank when this returns."""

    def agree(self, decision: Any) -> list[Any]:
        """What every rank decided, in rank order. The work on this device is done when it returns."""


def grown(current: int, needed: int, least: int) -> int:
    """Bytes of a half that holds `needed`: the next power of two, never less than `least` or `current`."""
    size = max(current, least, 4096)
    while size < needed:
        size *= 2
    return size


@dataclass
class _Slot:
    """The region of a stream, and whether a captured graph holds its addresses."""

    region: Region
    captured: bool = False


@dataclass
class Regions:
    """The regions of one group. Sizes in bytes; streams are numbers, equal numbers on this rank mean equal streams."""

    group_name: str
    provider: Provider
    least: int
    _slots: dict[int, _Slot] = field(default_factory=dict)
    _last: int | None = None
    _retired: list[Region] = field(default_factory=list)

    def workspace(self, stream: int, half_bytes: int, *, capturing: bool) -> Workspace:
        """The workspace of `stream`, with halves of at least half_bytes. Collective when it has to be made or grown.

        A stream that is being captured and has no region takes over the one used last: torch captures on a stream of
        its own, after a warm-up on another one, which gets a new region at its next call.
        """
        slot = self._slots.get(stream)
        if capturing:
            slot = self._captured(stream, half_bytes)
        elif slot is None or slot.region.workspace.half_bytes < half_bytes:
            slot = self._renew(stream, half_bytes, slot)
        self._last = stream
        return slot.region.workspace

    def workspaces(self) -> list[Workspace]:
        """Those in use now, and those that captured graphs still hold."""
        return [region.workspace for region in self._all()]

    def close(self) -> None:
        """Give every region back."""
        for region in self._all():
            region.close()
        self._slots.clear()
        self._retired.clear()

    def _all(self) -> list[Region]:
        return [slot.region for slot in self._slots.values()] + self._retired

    def _captured(self, stream: int, half_bytes: int) -> _Slot:
        source = stream if stream in self._slots else self._last
        slot = None if source is None else self._slots.get(source)
        room = 0 if slot is None else slot.region.workspace.half_bytes
        if source is None or slot is None or room < half_bytes:
            raise RuntimeError(
                f"interlace: group {self.group_name!r} needs {half_bytes} bytes of workspace per half and has {room}, "
                "and no memory can be set up while a CUDA graph is captured; warm up first: run the same calls, with "
                "the largest shapes, once before the capture, on every rank"
            )
        if source != stream:
            self._slots[stream] = self._slots.pop(source)
        slot.captured = True
        return slot

    def _renew(self, stream: int, half_bytes: int, old: _Slot | None) -> _Slot:
        number = len(self._slots) + len(self._retired)
        if old is None and len(self._slots) >= MAX_REGIONS:
            raise ValueError(
                f"interlace: group {self.group_name!r} is used on more than {MAX_REGIONS} streams; "
                "call its ops on few, long-lived streams"
            )
        current = 0 if old is None else old.region.workspace.half_bytes
        size = grown(current, half_bytes, self.least)
        self._agree(("replace" if old is not None else "add", number, size))
        region = self.provider.open(size)
        if old is not None and old.captured:
            self._retired.append(old.region)  # a graph replays with its addresses
        elif old is not None:
            old.region.close()
        slot = _Slot(region)
        self._slots[stream] = slot
        return slot

    def _agree(self, decision: tuple[str, int, int]) -> None:
        decisions = self.provider.agree(decision)
        for rank, other in enumerate(decisions):
            if tuple(other) != decision:
                raise ValueError(
                    f"interlace: ranks of group {self.group_name!r} set up different workspaces: here "
                    f"{_words(decision)}, rank {rank} {_words(tuple(other))}; every rank must make the same calls in "
                    "the same order on as many streams"
                )


def _words(decision: tuple[str, int, int]) -> str:
    what, number, size = decision
    return f"{what}s region {number} with halves of {size} bytes"
