"""`python -m interlace.bench`, which torchrun can start."""

from .command import bench

if __name__ == "__main__":
    bench(prog_name="interlace bench")
