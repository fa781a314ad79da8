"""Routed experts over the ranks: `interlace bench moe`."""

from __future__ import annotations

import sys

from interlace.bench.command import bench

if __name__ == "__main__":
    bench(["moe", *sys.argv[1:]])
