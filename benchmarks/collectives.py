"""Plain collectives, 4 KB to 64 MB: on the symmetric heap, by gloo, and by MPI where mpi4py is installed.

Intel MPI comes as a wheel (pip install impi-rt mpi4py), Open MPI from the distribution; without either the
column says absent. With MPI the ranks are started by its mpiexec and torch's process group is set up beside
it. Bytes are those of the whole result of all-reduce and all-gather, and of the input of reduce-scatter;
busbw counts what crosses the wire: 2 (n - 1) / n of them for all-reduce, (n - 1) / n for the others.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor

from interlace import functional
from interlace.bench import leave
from interlace.bench.harness import Column, Session, on_ranks, options

KIBI = 1024
SIZES = (4 * KIBI, 16 * KIBI, 64 * KIBI, 256 * KIBI, 1024 * KIBI, 4096 * KIBI, 16384 * KIBI, 65536 * KIBI)
QUICK_SIZES = (4 * KIBI, 256 * KIBI, 4096 * KIBI)
OPS = ("all_reduce", "reduce_scatter", "all_gather")

COLUMNS = [
    Column("op", "op", width=14),
    Column("dtype", "dtype"),
    Column("bytes", "bytes", "{:,}", 11),
    Column("us", "us", "{:.1f}"),
    Column("p95", "p95_us", "{:.1f}"),
    Column("busbw GB/s", "busbw", "{:.2f}", 10),
    Column("gloo us", "gloo_us", "{:.1f}"),
    Column("gloo p20", "gloo_p20_us", "{:.1f}"),
    Column("x gloo", "gloo", "{:.2f}"),
    Column("MPI us", "mpi_us", "{:.1f}"),
    Column("us / MPI", "against_mpi", "{:.3f}"),
]


def ours(op: str, x: Tensor, group: str) -> Tensor:
    """The collective of interlace.functional."""
    if op == "all_reduce":
        return functional.all_reduce(x, group=group)
    if op == "reduce_scatter":
        return functional.reduce_scatter(x, group=group)
    return functional.all_gather(x, group=group)


def gloo(op: str, x: Tensor, out: Tensor, scratch: Tensor) -> Tensor:
    """The same by torch.distributed, into buffers that exist. It adds in place, so x is copied first."""
    if op == "all_gather":
        dist.all_gather(list(out.chunk(dist.get_world_size())), x)
        return out
    scratch.copy_(x)
    dist.all_reduce(scratch)
    if op == "all_reduce":
        return scratch
    return scratch.chunk(dist.get_world_size())[
        dist.get_rank()
    ]  # faster than gloo's reduce_scatter from 4 MB on


def mpi(op: str, x: Tensor, out: Tensor, world: Any, kind: Any) -> Tensor:
    """The same by MPI, between buffers that exist; fp32 only, MPI knows no bf16."""
    from mpi4py import MPI

    source, sink = [x.numpy(), kind], [out.numpy(), kind]
    if op == "all_reduce":
        world.Allreduce(source, sink, MPI.SUM)
    elif op == "reduce_scatter":
        world.Reduce_scatter_block(source, sink, MPI.SUM)
    else:
        world.Allgather(source, sink)
    return out


def tensors_for(op: str, count: int, dtype: torch.dtype, session: Session) -> tuple[Tensor, Tensor]:
    """This rank's x and the expected result: small integers, whose sums are exact."""
    generator = torch.Generator().manual_seed(7)
    every = torch.randint(-8, 9, (session.world_size, count), generator=generator)
    if op == "all_gather":
        whole = every[0]
        return whole.chunk(session.world_size)[session.rank].to(dtype), whole.to(dtype)
    total = every.sum(0)
    x = every[session.rank].to(dtype)
    return x, (total if op == "all_reduce" else total.chunk(session.world_size)[session.rank]).to(dtype)


def one(session: Session, op: str, size: int, dtype: torch.dtype, world: Any | None) -> None:
    """Check and time one collective of one size."""
    x, want = tensors_for(op, size // dtype.itemsize, dtype, session)
    out, scratch = torch.empty_like(want), torch.empty_like(x)
    variants: dict[str, Callable[[], Tensor]] = {
        "interlace": lambda: ours(op, x, session.group.name),
        "gloo": lambda: gloo(op, x, out, scratch),
    }
    if world is not None and dtype == torch.float32:
        from mpi4py import MPI

        into = torch.empty_like(want)
        variants["MPI"] = lambda: mpi(op, x, into, world, MPI.FLOAT)
    for name, call in variants.items():
        session.check(f"{op} {dtype} {size} bytes {name}", call(), want)
    t = session.time(variants, budget_seconds=2.0)
    mine, other = t.summary("interlace"), t.summary("gloo")
    share = (session.world_size - 1) / session.world_size * (2 if op == "all_reduce" else 1)
    with_mpi = "MPI" in variants
    session.add(
        op=op,
        dtype=str(dtype).removeprefix("torch."),
        bytes=size,
        us=mine.median * 1e6,
        p95_us=mine.p95 * 1e6,
        busbw=size * share / mine.median / 1e9,
        gloo_us=other.median * 1e6,
        gloo_p20_us=other.p20 * 1e6,
        gloo=other.p20 / mine.median,
        mpi_us=t.summary("MPI").median * 1e6 if with_mpi else None,
        against_mpi=t.ratio("interlace", "MPI") if with_mpi else None,
        kept=mine.kept,
        taken=mine.taken,
    )


def run(settings: Mapping[str, object]) -> int:
    """On every rank."""
    session = Session("collectives", COLUMNS, settings)
    world = None
    if settings.get("mpi"):
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        session.say(f"MPI: {MPI.Get_library_version().splitlines()[0]}")
    else:
        session.say(f"MPI: absent ({settings.get('no_mpi')})")
    for op in OPS:
        for dtype in session.dtypes:
            for size in QUICK_SIZES if session.quick else SIZES:
                one(session, op, size, dtype, world)
    return session.finish()


def mpiexec() -> tuple[str | None, str]:
    """The mpiexec to use, or None and why there is none."""
    if importlib.util.find_spec("mpi4py") is None:
        return None, "mpi4py is not installed"
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.is_file() else shutil.which("mpiexec")
    return found, "" if found else "no mpiexec on PATH"


def under_mpi(program: str, settings: Mapping[str, object], ranks: int) -> int:
    """Start the ranks with mpiexec; a file is their meeting point."""
    with tempfile.TemporaryDirectory() as folder:
        place = json.dumps({**settings, "mpi": True, "store": f"{folder}/store"})
        command = [program, *unpinned(program), "-n", str(ranks)]
        return subprocess.run([*command, sys.executable, __file__, "--as-rank", place]).returncode


def unpinned(program: str) -> list[str]:
    """Arguments that keep mpiexec from pinning the ranks: that is done here, alike for all columns."""
    version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
    return ["-genv", "I_MPI_PIN", "0"] if "Intel" in version else ["--bind-to", "none"]


def as_mpi_rank(settings: Mapping[str, object]) -> int:
    """One of mpiexec's processes."""
    from mpi4py import MPI

    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    store = dist.FileStore(str(settings["store"]), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(minutes=5))
    try:
        return run(settings)
    finally:
        leave()


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@options
@click.option(
    "--mpi/--no-mpi", default=True, show_default=True, help="Compare with MPI where it is installed."
)
@click.option("--as-rank", "place", hidden=True)
def main(ranks: int, rank: int | None, mpi: bool, place: str | None, **settings: object) -> None:
    """Start the ranks with mpiexec where there is one."""
    if place is not None:
        raise SystemExit(as_mpi_rank(json.loads(place)))
    program, reason = mpiexec() if mpi and rank is None else (None, "not asked for")
    if program is not None:
        raise SystemExit(under_mpi(program, settings, ranks))
    on_ranks(__file__, run, {**settings, "no_mpi": reason}, ranks, rank)


if __name__ == "__main__":
    main()
