"""How much memory the package holds in this process, and for what."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ._native import _C
from .windows import window_bytes

__all__ = ["GroupMemory", "MemoryReport", "memory_report"]


@dataclass(frozen=True)
class GroupMemory:
    """One group's memory on this rank, bytes: segment (control page and two halves of staging), and the window of
    context-parallel attention.
    """

    group: str
    rank: int
    world_size: int
    segment_bytes: int
    half_bytes: int
    window_bytes: int = 0


@dataclass(frozen=True)
class MemoryReport:
    """Bytes held by this process: shared segments by group, scratch of the kernels, packed weights."""

    groups: tuple[GroupMemory, ...]
    scratch_bytes: int
    packed_bytes: int

    @property
    def total_bytes(self) -> int:
        return (
            sum(g.segment_bytes + g.window_bytes for g in self.groups)
            + self.scratch_bytes
            + self.packed_bytes
        )

    def __str__(self) -> str:
        mib = 1 << 20
        lines = [f"interlace holds {self.total_bytes / mib:.1f} MiB in this process"]
        lines += [
            f"  group {g.group!r} (rank {g.rank} of {g.world_size}): {g.segment_bytes / mib:.1f} MiB shared, "
            f"2 x {g.half_bytes / mib:.1f} MiB of staging"
            + (f", {g.window_bytes / mib:.1f} MiB window" if g.window_bytes else "")
            for g in self.groups
        ]
        lines.append(f"  scratch of the kernels: {self.scratch_bytes / mib:.1f} MiB")
        lines.append(f"  packed weights: {self.packed_bytes / mib:.1f} MiB, in place of plain ones")
        return "\n".join(lines)


def memory_report() -> MemoryReport:
    """What interlace holds in this process now; print it for one line per group."""
    from .packing import packed_bytes

    groups = []
    for name in _C.group_names():
        info = _C.describe_group(name)
        groups.append(
            GroupMemory(
                name,
                info["rank"],
                info["world_size"],
                info["segment_bytes"],
                info["half_bytes"],
                window_bytes(name),
            )
        )
    return MemoryReport(tuple(groups), torch.ops.interlace.engine_info()[3], packed_bytes())
