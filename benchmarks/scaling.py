"""A decoder on 1, 2, .. ranks: `interlace bench scaling`."""

from __future__ import annotations

import sys

from interlace.bench.command import bench

if __name__ == "__main__":
    bench(["scaling", *sys.argv[1:]])
