"""Other libraries that do the same work: which are here, in which version, what they are asked to do.

A peer is optional. One that is not here stays in the list with the reason, so that a table never passes over it in
silence. What a peer cannot do (a dtype, an op) it answers with None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from . import deepspeed_shm

__all__ = ["Peer", "Product", "find_peers", "product_of", "said"]

Sum: TypeAlias = Callable[[Tensor], Tensor]
Product: TypeAlias = Callable[[Tensor, Tensor], Tensor]
# (op, an input, the tensor the result goes to) -> the collective of an input, or None
Collectives: TypeAlias = Callable[[str, Tensor, Tensor], "Sum | None"]
SUMMING = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True)
class Peer:
    """A library. absent: why it takes no part, else None. collective, product: what it does, where it does."""

    name: str
    version: str | None
    absent: str | None = None
    collective: Collectives | None = None
    products: Mapping[str, Product] | None = None

    def entry(self) -> dict[str, Any]:
        """For the report."""
        return {"name": self.name, "version": self.version, "absent": self.absent}


def find_peers(settings: Mapping[str, object], device: torch.device, group_name: str) -> list[Peer]:
    """All peers this package knows, here or not. Collective: DeepSpeed may be built, by the first rank first."""
    if not settings.get("peers", True):
        return [Peer(name, None, "not asked for") for name in NAMES]
    cpu = device.type == "cpu"
    return [
        _symm_mem(group_name),
        _deepspeed() if cpu else Peer("deepspeed", _installed("deepspeed"), "compared on CPUs only"),
        _mpi(settings) if cpu else Peer("mpi", _installed("mpi4py"), "compared on CPUs only"),
        _cuda_only("transformer_engine", "transformer_engine", cpu),
        _cuda_only("flashinfer", "flashinfer-python", cpu),
    ]


NAMES = ("symm_mem", "deepspeed", "mpi", "transformer_engine", "flashinfer")


def said(peers: list[Peer]) -> str:
    """Which are here and which are not, in a line."""
    here = [f"{peer.name} {peer.version}" for peer in peers if peer.absent is None]
    absent = [
        f"{peer.name} ({', '.join(filter(None, (peer.version, peer.absent)))})"
        for peer in peers
        if peer.absent is not None
    ]
    return f"peers: {', '.join(here) or 'none'}; absent: {', '.join(absent) or 'none'}"


def product_of(peer: Peer, op: str, x: Tensor, weight: Tensor, rows: int) -> Product | None:
    """The fused op as this peer does it: its own, or F.linear with its collective; None when it has neither.

    x [M or M / ranks, K], weight [N, K]; rows: M. Equal shards only, as these libraries want them.
    """
    if peer.products and op in peer.products:
        return peer.products[op]
    if peer.collective is None:
        return None
    size = dist.get_world_size()
    if op == "all_gather_gemm":
        whole = x.new_empty(rows, x.shape[1])
        gather = peer.collective("all_gather", x, whole)
        return None if gather is None else lambda x, w: F.linear(gather(x), w)
    partial = x.new_empty(rows, weight.shape[0])
    out = partial.new_empty(rows // size, weight.shape[0]) if op == "gemm_reduce_scatter" else partial
    total = peer.collective("all_reduce" if op == "gemm_all_reduce" else "reduce_scatter", partial, out)
    return None if total is None else lambda x, w: total(F.linear(x, w))


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cuda_only(name: str, package: str, cpu: bool) -> Peer:
    found = _installed(package)
    if found is None:
        return Peer(name, None, "not installed")
    return Peer(name, found, "needs CUDA" if cpu else "not compared on CUDA yet")


def _symm_mem(group_name: Any) -> Peer:
    """torch's fused products with communication; on a CPU the fallback that torch itself takes there."""
    import torch.distributed._symmetric_memory as symm_mem

    try:
        gather, scatter = (
            symm_mem._fused_all_gather_matmul_fallback,
            symm_mem._fused_matmul_reduce_scatter_fallback,
        )
    except AttributeError:
        return Peer("symm_mem", torch.__version__, "this torch has no such fallback")
    return Peer(
        "symm_mem",
        f"{torch.__version__} (fallback)",
        products={
            "all_gather_gemm": lambda x, w: gather(x, [w.t()], 0, group_name, return_A=False)[1][0],
            "gemm_reduce_scatter": lambda x, w: scatter(x, w.t(), "sum", 0, group_name),
        },
    )


def _deepspeed() -> Peer:
    """DeepSpeed's all-reduce over shared memory, in place, so x is copied first; fp32, fp16, bf16."""
    found = _installed("deepspeed")
    if found is None:
        return Peer("deepspeed", None, "not installed")
    all_reduce_, reason = deepspeed_shm.load()
    if all_reduce_ is None:
        return Peer("deepspeed", found, reason)

    def collective(op: str, x: Tensor, out: Tensor) -> Sum | None:
        if op != "all_reduce" or x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return None
        return lambda x: all_reduce_(out.copy_(x))

    return Peer("deepspeed", found, collective=collective)


def _mpi(settings: Mapping[str, object]) -> Peer:
    if not settings.get("mpiexec"):
        return Peer(
            "mpi", _installed("mpi4py"), str(settings.get("no_mpi", "mpiexec did not start the ranks"))
        )
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    library = MPI.Get_library_version().split(",")[0].strip().removesuffix("\x00")
    return Peer(
        "mpi", f"{library}, mpi4py {version('mpi4py')}", collective=lambda *a: _mpi_call(world, MPI, *a)
    )


def _mpi_call(world: Any, mpi: Any, op: str, x: Tensor, out: Tensor) -> Sum | None:
    """Between buffers that exist. MPI adds fp32 and fp64; it moves any bytes."""
    kinds = {torch.float32: mpi.FLOAT, torch.float64: mpi.DOUBLE}
    if op in SUMMING:
        if x.dtype not in kinds:
            return None
        kind = kinds[x.dtype]
        call = world.Allreduce if op == "all_reduce" else world.Reduce_scatter_block
        sink = [out.numpy(), kind]
        return lambda x: (call([x.numpy(), kind], sink, mpi.SUM), out)[1]
    move = world.Allgather if op == "all_gather" else world.Alltoall
    sink = [_bytes(out), mpi.BYTE]
    return lambda x: (move([_bytes(x), mpi.BYTE], sink), out)[1]


def _bytes(tensor: Tensor) -> Any:
    return tensor.flatten().view(torch.uint8).numpy()
