"""The blocks of a layer, split over the ranks: `interlace bench layer`."""

from __future__ import annotations

import sys

from interlace.bench.command import bench

if __name__ == "__main__":
    bench(["layer", *sys.argv[1:]])
