"""A small trainer that runs one layout for some steps and records what it took: `interlace train`.

Nothing here is an engine: mesh, sharding, pipelining, recomputation and optimizer are torch's, the split layers are
interlace's. What it adds is the record, run.json, which `interlace plan --verify` compares with the planner's numbers.
"""

from __future__ import annotations
