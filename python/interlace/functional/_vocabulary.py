"""Which entries of a vocabulary this rank holds, and the check that ids are part of it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..groups import GroupInfo
from ..reference import chunk_range
from ._check import refuse

__all__ = ["check_ids", "first_entry", "places"]


def first_entry(op: str, entries: int, vocab_size: int, vocab_start: int | None, info: GroupInfo) -> int:
    """Index of the first of the `entries` on this rank: `vocab_start`, or that of its chunk."""
    if vocab_start is None:
        begin, end = chunk_range(vocab_size, info.world_size, info.rank)
        if entries != end - begin:
            refuse(
                info,
                ValueError,
                f"{op}: vocab_size={vocab_size} gives rank {info.rank} of {info.world_size} {end - begin} entries, "
                f"got {entries}; cut as torch.chunk does, or pass vocab_start",
            )
        return begin
    if vocab_start < 0 or vocab_start + entries > vocab_size:
        refuse(
            info,
            ValueError,
            f"{op}: entries {vocab_start} to {vocab_start + entries} are not within vocab_size={vocab_size}",
        )
    return vocab_start


def check_ids(
    op: str, what: str, ids: Tensor, vocab_size: int, info: GroupInfo, ignore_index: int | None = None
) -> tuple[int, int] | None:
    """ids [..] int32 or int64 in [0, vocab_size), or equal to ignore_index; returns the least and the greatest.

    On a GPU and in compiled code the values are checked without waiting for them, by an assertion of the device, and
    nothing is known of them here: None.
    """
    if ids.dtype not in (torch.int64, torch.int32):
        refuse(info, TypeError, f"{op}: {what} is {ids.dtype}; expected int32 or int64")
    if ids.is_cuda or torch.compiler.is_compiling():
        torch._assert_async(~_outside(ids, vocab_size, ignore_index).any(), f"{op}: {what} is out of range")
        return None
    if ids.is_meta or not ids.numel():
        return None
    low, high = (int(bound) for bound in torch.aminmax(ids))
    if low < 0 or high >= vocab_size:
        wrong = ids[_outside(ids, vocab_size, ignore_index)]
        if wrong.numel():
            refuse(
                info,
                ValueError,
                f"{op}: {what} holds {int(wrong[0])}; expected 0 to {vocab_size - 1}"
                + ("" if ignore_index is None else f" or ignore_index={ignore_index}"),
            )
    return low, high


def _outside(ids: Tensor, vocab_size: int, ignore_index: int | None) -> Tensor:
    outside = (ids < 0) | (ids >= vocab_size)
    return outside if ignore_index is None else outside & (ids != ignore_index)


def places(ids: Tensor, start: int, entries: int) -> tuple[Tensor, Tensor]:
    """Place of each id among this rank's entries, any for those of other ranks; and which those are."""
    wanted = ids - start
    if not entries:
        return torch.zeros_like(wanted), torch.ones_like(wanted, dtype=torch.bool)
    place = wanted.clamp(0, entries - 1)
    return place, place.ne(wanted)
