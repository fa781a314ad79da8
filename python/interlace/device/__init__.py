"""Symmetric memory on GPUs: what the kernels' launches are told about a group, and how their failures come back.

`workspace` gives the memory of (group, current stream); `check` raises what a kernel recorded. Providers: `peers` for
one GPU per process (torch's symmetric memory), `virtual` for several ranks on one GPU in one process.
"""

from .registry import abort, check, check_group, destroy, multicast, unavailable, workspace
from .virtual import VirtualRanks
from .workspace import Workspace

__all__ = [
    "VirtualRanks",
    "Workspace",
    "abort",
    "check",
    "check_group",
    "destroy",
    "multicast",
    "unavailable",
    "workspace",
]
