"""What the ops that sum over ranks have in common: the decision, and the kernels of ours it may lead to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference as plain
from ..checks import wrap_dim
from ..heuristics import Decision
from . import launches
from .deciding import OURS, decide
from .launches import Epilogue, Place
from .shapes import dense, leads, per_index

__all__ = ["Sum", "summed"]

# from this size on half the bytes on the wire are worth an exchange of our own over one call of the backend
_EXCHANGE_BYTES = 1 << 20


@dataclass(frozen=True)
class Sum:
    """Sum over ranks and products of x_i @ W_i^T, then the epilogue. scatter_dim: None for an all-reduce.

    x_scale [M, 1] and weight_scale (one element or N) are given for fp8, and then out_dtype.
    """

    op: str
    xs: Sequence[Tensor]
    weights: Sequence[Tensor]
    epilogue: Epilogue
    place: Place
    scatter_dim: int | None = None
    length: int | None = None
    x_scale: Tensor | None = None
    weight_scale: Tensor | None = None
    out_dtype: torch.dtype | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the output."""
        return self.out_dtype or self.xs[0].dtype

    def partial(self) -> Tensor:
        """This rank's product [M, N], rounded to the output's dtype."""
        if self.x_scale is not None and self.weight_scale is not None:
            x = plain.flat_rows(self.xs[0])
            return plain.scaled_linear(x, self.x_scale, self.weights[0], self.weight_scale, None, self.dtype)
        rows = [plain.flat_rows(x) for x in self.xs]
        if len(rows) == 1:
            return F.linear(rows[0], self.weights[0])
        return plain.sum_of_products(rows, self.weights).to(self.dtype)


def summed(
    call: Sum, *, reference: Callable[[], Any], pieces: Callable[[bool], Any]
) -> tuple[Tensor, Tensor | None]:
    """(sums, normalised or None), whole or this rank's part of scatter_dim.

    reference and pieces(overlapped) go by torch.distributed; they return sums, or (normalised, sums).
    """
    x, n = call.xs[0], call.weights[0].shape[0]
    dim = None if call.scatter_dim is None else wrap_dim(call.op, "scatter_dim", call.scatter_dim, x.dim())
    columns = dim is not None and dim == x.dim() - 1
    sizes = None
    if dim is not None and not columns:
        sizes = plain.scatter_sizes(x.shape[dim], call.place.group_name, x.device, call.length)
    decision = decide(
        call.op, x, call.place, rows=x.shape[:-1].numel(), width=n,
        dim_leads=dim is None or leads(x, dim), products=len(call.xs), out_dtype=call.out_dtype,
    )  # fmt: skip
    if decision.algorithm in OURS:
        return _by_kernels(call, decision, dim, sizes)
    exchanged = (
        decision.algorithm == "baseline"
        and call.dtype is torch.bfloat16
        and not columns
        and x.shape[:-1].numel() * n * 2 >= _EXCHANGE_BYTES
    )
    overlapped = decision.algorithm == "decomposed"
    return _ordered(pieces(overlapped) if overlapped or exchanged else reference())


def _ordered(result: Any) -> tuple[Tensor, Tensor | None]:
    if isinstance(result, Tensor):
        return result, None
    normalised, sums = result
    return sums, normalised


def _by_kernels(
    call: Sum, decision: Decision, dim: int | None, sizes: list[int] | None
) -> tuple[Tensor, Tensor | None]:
    x = call.xs[0]
    rows = None
    shape = list(x.shape[:-1])
    if dim is not None and sizes is not None:
        rows = [size * per_index(x.shape[:-1], dim) for size in sizes]
        shape[dim] = sizes[call.place.rank]
    given = call.epilogue
    flat = None if given.residual is None else plain.flat_rows(given.residual)
    epilogue = Epilogue(dense(given.bias), dense(flat), dense(given.norm_weight), given.eps)
    if decision.algorithm == "fused":
        flats = [plain.flat_rows(x) for x in call.xs]
        results = launches.fused_reduce(
            flats, call.weights, epilogue, rows, call.place, decision.launch, out_dtype=call.dtype,
            x_scale=call.x_scale, weight_scale=call.weight_scale,
        )  # fmt: skip
    elif rows is None:
        results = launches.all_reduce(
            call.partial(), decision.algorithm, epilogue, call.place, decision.launch
        )
    else:
        results = launches.reduce_scatter(call.partial(), rows, epilogue, call.place, decision.launch)
    sums, normalised = results
    whole = sums.view(*shape, -1) if sums.numel() else sums.new_empty([*shape, sums.shape[-1]])
    return whole, None if normalised is None else normalised.view(whole.shape)
