"""transformers' Conv1D (a linear whose weight is [in, out]) split over a group. Importing this needs transformers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .. import functional
from ..groups import Group, resolve
from .layout import ParameterLayout, take
from .linear import SEQUENCE_DIM, gather_features
from .products import SharedInput, column_products
from .sequence import SequenceLength
from .shard import Shards, checked_shards
from .split import SplitModule

__all__ = ["ColumnParallelConv1D", "ParallelConv1D", "RowParallelConv1D"]


class ParallelConv1D(SplitModule, Conv1D):
    """What both share: this rank's shard of a Conv1D, under its names. `nx`, `nf`: global input and output sizes."""

    split_dim: int  # of the weight [nx, nf]
    style: str
    packs_weight = False  # the tile engine's layout is for [out, in]
    return_bias = False

    def __init__(
        self, whole: nn.Module, group: Group, shards: Shards | None, sequence_parallel: bool
    ) -> None:
        nn.Module.__init__(self)  # Conv1D's would allocate the whole weight
        info = resolve(group)
        self.group_name, self.rank, self.world_size = info.name, info.rank, info.world_size
        weight, bias = whole.get_parameter("weight"), whole.get_parameter("bias")
        self.nx, self.nf = weight.shape
        total = weight.shape[self.split_dim]
        what = "nf" if self.split_dim == 1 else "nx"
        self.shards = checked_shards(type(self).__name__, what, total, info.world_size, shards, None)
        self.sequence_parallel, self.sequence_dim = sequence_parallel, SEQUENCE_DIM
        ranges = self.shards.ranges(self.rank)
        with torch.no_grad():
            own = take(weight, self.split_dim, ranges).clone(memory_format=torch.contiguous_format)
            own_bias = take(bias, 0, ranges) if self.split_dim == 1 else bias
            self.weight = nn.Parameter(own, weight.requires_grad)
            self.bias = nn.Parameter(own_bias.clone(), bias.requires_grad)
        self.train(whole.training)

    def matrix(self) -> Tensor:
        """The weight as nn.Linear has it, [out of this rank, in of this rank]."""
        return self.weight.t()

    @property
    def in_features(self) -> int:
        """Global size of the input."""
        return int(self.nx)

    @property
    def out_features(self) -> int:
        """Global size of the output."""
        return int(self.nf)

    def parameter_layouts(self) -> dict[str, ParameterLayout]:
        """How the whole weight, and in a column Conv1D the whole bias, are cut."""
        cut: dict[str, tuple[tuple[int, ...], int]] = {"weight": ((self.nx, self.nf), self.split_dim)}
        if self.split_dim == 1:
            cut["bias"] = ((self.nf,), 0)
        return {
            name: ParameterLayout.of_shards(shape, dim, self.shards, self.group_name)
            for name, (shape, dim) in cut.items()
        }

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(nf={self.nf}, nx={self.nx}, local={tuple(self.weight.shape)}, "
            f"rank={self.rank}/{self.world_size})"
        )


class ColumnParallelConv1D(ParallelConv1D):
    """Y_r = X W_r + b_r: this rank's output features of a Conv1D, several slices where q, k and v are packed.

    x [.., nx], equal on all ranks (its shard along the sequence with sequence_parallel), -> [.., nf of this rank];
    weight [nx, nf of this rank]. dX is summed over the group, rows that several ranks hold have summed gradients.
    """

    split_dim = 1
    style = "column"

    def __init__(
        self,
        whole: nn.Module,
        group: Group,
        shards: Shards | None,
        sequence_parallel: bool,
        gather_output: bool,
    ) -> None:
        super().__init__(whole, group, shards, sequence_parallel)
        self.gather_output = gather_output
        self.shared_input: SharedInput | None = None
        self.shared_place = 0
        self.sequence_length: SequenceLength | None = None
        self.reads_gathered = False

    @classmethod
    def from_conv1d(
        cls,
        whole: nn.Module,
        group: Group = None,
        *,
        shards: Shards | None = None,
        gather_output: bool = False,
        sequence_parallel: bool = False,
    ) -> ColumnParallelConv1D:
        """This rank's columns of `whole`, copied; dtype, device, requires_grad and train mode are kept."""
        return cls(whole, group, shards, sequence_parallel, gather_output)

    def forward(self, x: Tensor) -> Tensor:
        """x -> this rank's columns; see the class."""
        if self.shared_input is not None:
            out = self.shared_input.take(self.shared_place, x, None)
        else:
            out = column_products([self], x, is_gathered=self.reads_gathered)[0]
        if self.gather_output:
            out = gather_features(out, self.shards, self.group_name, self.world_size)
        return out


class RowParallelConv1D(ParallelConv1D):
    """Y = sum over ranks of X_r W_r, plus b once: this rank's input features of a Conv1D.

    x [.., nx of this rank] (all of them with input_is_parallel=False) -> [.., nf], equal on all ranks, or this
    rank's chunk along the sequence with sequence_parallel. weight [nx of this rank, nf]. What comes in on a rank
    with an empty shard is ignored (more ranks than heads).
    """

    split_dim = 0
    style = "row"
    drop_input = True

    def __init__(
        self, whole: nn.Module, group: Group, shards: Shards | None, sequence_parallel: bool, parallel: bool
    ) -> None:
        super().__init__(whole, group, shards, sequence_parallel)
        if self.shards.overlapping:
            raise ValueError(
                f"RowParallelConv1D: shards {self.shards} overlap, so features would count twice"
            )
        self.input_is_parallel = parallel

    @classmethod
    def from_conv1d(
        cls,
        whole: nn.Module,
        group: Group = None,
        *,
        shards: Shards | None = None,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
    ) -> RowParallelConv1D:
        """This rank's rows of `whole`, copied; dtype, device, requires_grad and train mode are kept."""
        return cls(whole, group, shards, sequence_parallel, input_is_parallel)

    def forward(self, x: Tensor) -> Tensor:
        """x -> the sum over the ranks; see the class."""
        if not self.input_is_parallel:
            x = take(functional.copy_to_region(x, group=self.group_name), -1, self.shards.ranges(self.rank))
        elif self.drop_input and self.weight.shape[0] == 0:
            x = x.narrow(-1, 0, 0)
        if self.sequence_parallel:
            return functional.linear_reduce_scatter(
                x, self.matrix(), self.bias, group=self.group_name, scatter_dim=self.sequence_dim
            )
        return functional.linear_all_reduce(x, self.matrix(), self.bias, group=self.group_name)
