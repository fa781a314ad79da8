"""Which algorithm a call on CUDA tensors takes: a pure function of what every rank of the group knows alike.

`choose(problem, hardware, table)` filters the candidates, each with a reason, asks the tuned table, and falls back on
crossovers. Nothing here touches a device or a process group.
"""

from .choose import choose
from .problem import ALGORITHMS, Decision, Launch, Problem
from .tuned import Crossovers, Entry, Table, bucket_of, load, merged, parse, read, write

__all__ = [
    "ALGORITHMS",
    "Crossovers",
    "Decision",
    "Entry",
    "Launch",
    "Problem",
    "Table",
    "bucket_of",
    "choose",
    "load",
    "merged",
    "parse",
    "read",
    "write",
]
