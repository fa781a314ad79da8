"""The same split model with several ways to multiply and sum: what the rows of the demo's table run.

All paths share one set of shards and the model's own code; only the parallel linears differ. A path has two
models: the whole path, and the same engine with its collectives left out ("compute only"). The result of the
latter is wrong on purpose; its time says what the path would cost if communication were free.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import interlace
from interlace.modules import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)

__all__ = ["PlainColumn", "PlainEmbedding", "PlainRow", "SplitPath", "split_paths", "with_linears"]

Product = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class SplitPath:
    """One path: its model, the same model without communication, and the backend both run under."""

    name: str
    model: nn.Module
    compute_only: nn.Module
    backend: Callable[[], AbstractContextManager[None]] = nullcontext


class PlainColumn(nn.Module):
    """A column-parallel linear in plain torch: F.linear on the shard, torch.distributed where all is wanted.

    x [.., K], equal on all ranks -> [.., N_r], or [.., N] with the linear's gather_output. Without
    `communicate` the columns of the other ranks are zero: the caller needs the shape.
    """

    def __init__(
        self, linear: ColumnParallelLinear, communicate: bool, product: Product | None = None
    ) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.sizes = linear.shards.sizes if linear.gather_output else ()
        self.whole_bias = isinstance(linear, VocabParallelHead)
        self.communicate, self.product = communicate, product

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        bias = None if self.whole_bias else self.bias
        if self.product is None:
            out = F.linear(x, self.weight, bias)
        else:
            out = self.product(x, self.weight)
            out = out if bias is None else out + bias
        if self.sizes:
            out = self._gathered(out)
        return out + self.bias if self.whole_bias and self.bias is not None else out

    def _gathered(self, out: Tensor) -> Tensor:
        if not self.communicate:
            return F.pad(out, (0, sum(self.sizes) - out.shape[-1]))
        padded = F.pad(out, (0, max(self.sizes) - out.shape[-1])).contiguous()
        parts = [torch.empty_like(padded) for _ in self.sizes]
        dist.all_gather(parts, padded)
        return torch.cat([part[..., :size] for part, size in zip(parts, self.sizes, strict=True)], dim=-1)


class PlainEmbedding(nn.Module):
    """A vocabulary-parallel embedding in plain torch: a masked lookup, all-reduce; without `communicate` no sum.

    ids [..] -> [.., H].
    """

    def __init__(self, embedding: VocabParallelEmbedding, communicate: bool) -> None:
        super().__init__()
        self.weight, self.communicate = embedding.weight, communicate
        self.start, self.end = embedding.shards.bounds(embedding.rank)

    def forward(self, ids: Tensor) -> Tensor:
        """See the class."""
        mine = (ids >= self.start) & (ids < self.end)
        out = F.embedding((ids - self.start).where(mine, 0), self.weight) * mine.unsqueeze(-1)
        if self.communicate:
            dist.all_reduce(out)
        return out


class PlainRow(nn.Module):
    """A row-parallel linear in plain torch: product on the shard, all-reduce at the module's boundary, bias.

    x [.., K_r] -> [.., N], the sum over the ranks; without `communicate` this rank's part of it.
    """

    def __init__(self, linear: RowParallelLinear, product: Product, communicate: bool) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.product, self.communicate = product, communicate

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        out = self.product(x, self.weight)
        if self.communicate:
            dist.all_reduce(out)
        return out if self.bias is None else out + self.bias


def with_linears(
    model: nn.Module,
    row: Callable[[RowParallelLinear], nn.Module] | None,
    column: Callable[[ColumnParallelLinear], nn.Module] | None,
    embedding: Callable[[VocabParallelEmbedding], nn.Module] | None = None,
) -> nn.Module:
    """A copy of the modules over the same tensors, with the parallel ones replaced; None keeps them."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared)
    for parent in list(twin.modules()):
        for name, child in list(parent.named_children()):
            if row is not None and isinstance(child, RowParallelLinear):
                setattr(parent, name, row(child))
            elif column is not None and isinstance(child, ColumnParallelLinear):
                setattr(parent, name, column(child))
            elif embedding is not None and type(child) is VocabParallelEmbedding:
                setattr(parent, name, embedding(child))
    return twin


def split_paths(split: nn.Module) -> list[SplitPath]:
    """The three split paths of a model that `interlace.parallelize` has split, over its shards.

    gloo: what a user of torch has today, F.linear and torch.distributed.all_reduce in the model's dtype.
    reference: interlace's modules on its torch.distributed backend (16-bit sums cross ranks in fp32).
    interlace: the fused ops, with the frozen weights packed for the tile engine. Running all three, this
    process holds plain and packed shards; a model in use holds the packed ones alone.
    """
    gloo, gloo_alone = (_plain(split, communicate) for communicate in (True, False))
    reference = with_linears(split, None, None)
    packed = interlace.pack_weights(split)
    return [
        SplitPath("gloo", gloo, gloo_alone),
        SplitPath("reference", reference, _without_sums(reference), lambda: interlace.backend("reference")),
        SplitPath("interlace", packed, _without_sums(packed)),
    ]


def _plain(split: nn.Module, communicate: bool) -> nn.Module:
    return with_linears(
        split,
        lambda r: PlainRow(r, F.linear, communicate),
        lambda c: PlainColumn(c, communicate),
        lambda e: PlainEmbedding(e, communicate),
    )


def _without_sums(model: nn.Module) -> nn.Module:
    # column_linear is the engine of the row-parallel ops without their collective, on every backend
    return with_linears(
        model,
        lambda r: PlainRow(r, _local_product(r.group_name), False),
        _alone,
        lambda e: PlainEmbedding(e, False),
    )


def _alone(linear: ColumnParallelLinear) -> nn.Module:
    """The linear itself, but for one that gathers its output."""
    if not linear.gather_output:
        return linear
    return PlainColumn(linear, False, _local_product(linear.group_name))


def _local_product(group_name: str) -> Product:
    return lambda x, weight: interlace.functional.column_linear(x, weight, group=group_name)
