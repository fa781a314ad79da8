"""Plain collectives on the symmetric heap, by gloo, and by peers that are installed: `interlace bench collective`."""

from __future__ import annotations

import sys

from interlace.bench.command import bench

if __name__ == "__main__":
    bench(["collective", *sys.argv[1:]])
