"""Whole decoders, split over the ranks: `interlace bench model`."""

from __future__ import annotations

import sys

from interlace.bench.command import bench

if __name__ == "__main__":
    bench(["model", *sys.argv[1:]])
