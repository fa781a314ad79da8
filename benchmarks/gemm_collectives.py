"""The three fused ops against what they replace and against their own parts. As `interlace bench gemm`."""

from __future__ import annotations

import sys

from interlace.bench.command import bench

if __name__ == "__main__":
    bench(["gemm", *sys.argv[1:]])
