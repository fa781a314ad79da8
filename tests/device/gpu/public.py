"""The public functions on several GPUs: every way of a call, forward and backward, against the unsharded layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

import interlace
import interlace.functional as il
from interlace import cuda_dispatch
from interlace.heuristics import Crossovers, Table
from tests import oracle
from tests.ops.linears import OPS, Case, Local, Result, compare, forward_backward

# rows that are no multiple of a tile, uneven shards, three dims, another dim than the first
CASES = (
    Case((1,), 64, 72, torch.bfloat16),
    Case((133,), 264, 200, torch.bfloat16, weight_layout="transposed"),
    Case((2, 67), 96, 136, torch.float16, dim=1, weights=2),
    Case((300,), 520, 264, torch.bfloat16, exact=False),
    Case((40,), 48, 24, torch.float32, exact=False),
)
ALWAYS_FUSED = Crossovers(0, 0, 0, 0, 0, 0)


@contextmanager
def fused_from_the_first_row(group_name: str) -> Iterator[None]:
    """Calls of any size take the fused kernels, as the measured crossovers of a table may say."""
    state = cuda_dispatch.known(group_name)
    if state is None:
        yield
        return
    before = state.table
    state.table = Table({"*": ALWAYS_FUSED}, {})
    state.decisions.clear()
    try:
        yield
    finally:
        state.table = before
        state.decisions.clear()


def check_public(here: torch.device) -> list[str]:
    """All linears by every backend, and the ops with norms; which algorithms ran."""
    name = interlace.resolve(None).name
    il.all_reduce(torch.ones(8, device=here), group=None)  # the group agrees on its GPUs
    seen = set()
    for choice in ("auto", "reference", "decomposed"):
        with interlace.backend(choice):  # type: ignore[arg-type]
            seen |= {check_linear(op, case, here) for op in OPS for case in CASES}
    with fused_from_the_first_row(name):
        seen |= {check_linear(op, case, here) for op in OPS for case in CASES}
        check_norms(here)
    check_norms(here)
    return sorted(seen)


def check_linear(name: str, case: Case, here: torch.device) -> str:
    """One linear with its gradients; the algorithm of its forward."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local: Local = OPS[name][0](case, rank, world_size)
    moved = dataclasses.replace(
        local,
        x=local.x.to(here),
        weights=[w.to(here) for w in local.weights],
        biases=[None if b is None else b.to(here) for b in local.biases],
        grad_outs=[g.to(here) for g in local.grad_outs],
    )
    result = forward_backward(name, case, moved, None)
    back = Result(
        [t.cpu() for t in result.outs],
        result.grad_x.cpu(),
        [t.cpu() for t in result.grad_weights],
        [t.cpu() for t in result.grad_biases],
    )
    compare(f"{name} on {here.type}", case, local, back)
    return interlace.last_path().algorithm


def check_norms(here: torch.device) -> None:
    """Sum, residual and RMSNorm of whole numbers: the sums are exact, the norm is that of torch."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(31)
    rows, columns, depth = 133, 264, 96
    xs = [oracle.integers((rows, depth), torch.bfloat16, generator) for _ in range(world_size)]
    weights = [oracle.integers((columns, depth), torch.bfloat16, generator) for _ in range(world_size)]
    residual = oracle.integers((rows, columns), torch.bfloat16, generator)
    norm_weight = oracle.normals((columns,), torch.bfloat16, generator)
    exact = sum(x.double() @ w.double().t() for x, w in zip(xs, weights, strict=True)) + residual.double()
    x, weight, scale = xs[rank].to(here), weights[rank].to(here), norm_weight.to(here)
    for scatter in (False, True):

        def mine(t: torch.Tensor, cut: bool = scatter) -> torch.Tensor:
            return oracle.chunk(t, 0, rank, world_size) if cut else t

        function = il.linear_reduce_scatter_norm if scatter else il.linear_all_reduce_norm
        with torch.no_grad():
            normalised, total = function(x, weight, None, mine(residual).to(here), scale, 1e-5, group=None)
        oracle.check_close("sums", total.cpu(), mine(exact), mine(exact).to(torch.bfloat16))
        same = torch.nn.functional.rms_norm(mine(exact), (columns,), norm_weight.double(), 1e-5)
        oracle.check_close("norm", normalised.cpu(), same, same.to(torch.bfloat16))
