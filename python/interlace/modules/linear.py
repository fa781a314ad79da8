"""`nn.Linear` split over a group: by output features (column) or by input features (row)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .. import functional
from ..groups import Group, resolve
from .layout import ParameterLayout, take
from .products import SharedInput, column_products
from .sequence import SequenceLength
from .shard import Shards, checked_shards
from .split import SplitModule

__all__ = ["ColumnParallelLinear", "ParallelLinear", "RowParallelLinear"]

# subclasses that compute x W^T + b with a forward of their own
SAME_AS_LINEAR = {("transformers.models.falcon.modeling_falcon", "FalconLinear")}
SEQUENCE_DIM = -2  # [.., sequence, features]; 0 for [sequence, batch, features]


class ParallelLinear(SplitModule, nn.Linear):
    """What both linears share: this rank's shard of an nn.Linear, under the names and the global sizes of the
    whole.

    `in_features` and `out_features` are global, `local_in_features` and `local_out_features` this rank's. Of
    the group the module keeps name, rank and size only, so it can be copied, pickled and saved.
    """

    split_dim: int  # of the weight
    style: str
    packs_weight = True  # `interlace.pack_weights` may keep a frozen weight in the tile engine's layout

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        group: Group,
        sequence_parallel: bool,
        sequence_dim: int,
        return_bias: bool,
        shards: Shards | None,
        shard_sizes: Sequence[int] | None,
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear's would allocate the whole weight
        op = type(self).__name__
        if in_features < 0 or out_features < 0:
            raise ValueError(
                f"{op}: in_features={in_features}, out_features={out_features}; expected sizes >= 0"
            )
        info = resolve(group)
        self.group_name, self.rank, self.world_size = info.name, info.rank, info.world_size
        self.in_features, self.out_features = in_features, out_features
        self.sequence_parallel, self.sequence_dim, self.return_bias = (
            sequence_parallel,
            sequence_dim,
            return_bias,
        )
        what, total = ("out_features", out_features) if self.split_dim == 0 else ("in_features", in_features)
        self.shards = checked_shards(op, what, total, info.world_size, shards, shard_sizes)
        local = self.shards.sizes[self.rank]
        self.local_out_features = local if self.split_dim == 0 else out_features
        self.local_in_features = local if self.split_dim == 1 else in_features
        self.weight = nn.Parameter(
            torch.empty(self.local_out_features, self.local_in_features, device=device, dtype=dtype)
        )
        if bias:
            self.bias = nn.Parameter(torch.empty(self.local_out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """nn.Linear's own draw, of which this rank keeps its shard: ranks seeded alike hold one consistent
        layer.

        Needs the memory of the whole weight for a moment.
        """
        if self.weight.is_meta:
            return
        whole = torch.empty(
            self.out_features, self.in_features, device=self.weight.device, dtype=self.weight.dtype
        )
        if whole.numel():
            nn.init.kaiming_uniform_(whole, a=math.sqrt(5))
        bias = None
        if self.bias is not None:
            bias = torch.empty(self.out_features, device=self.bias.device, dtype=self.bias.dtype)
            bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
            nn.init.uniform_(bias, -bound, bound)
        self._copy_shard(whole, bias)

    @torch.no_grad()
    def _copy_shard(self, weight: Tensor, bias: Tensor | None) -> None:
        ranges = self.shards.ranges(self.rank)
        self.weight.copy_(take(weight, self.split_dim, ranges))
        if self.bias is not None and bias is not None:
            self.bias.copy_(take(bias, 0, ranges) if self.split_dim == 0 else bias)

    def matrix(self) -> Tensor:
        """The weight as [out, in]: the weight."""
        return self.weight

    def parameter_layouts(self) -> dict[str, ParameterLayout]:
        """How the whole weight, and in a column linear the whole bias, are cut."""
        shape = (self.out_features, self.in_features)
        layouts = {"weight": ParameterLayout.of_shards(shape, self.split_dim, self.shards, self.group_name)}
        if self.bias is not None and self.split_dim == 0:
            layouts["bias"] = ParameterLayout.of_shards(shape[:1], 0, self.shards, self.group_name)
        return layouts

    def _adopt(self, linear: nn.Linear) -> None:
        """Take this rank's shard of `linear`, with its device, requires_grad and train mode. Built on meta so
        far.
        """
        if not linear.weight.is_meta:
            self.to_empty(device=linear.weight.device)
            self._copy_shard(linear.weight, linear.bias)
        self.weight.requires_grad_(linear.weight.requires_grad)
        if linear.bias is not None:
            self.bias.requires_grad_(linear.bias.requires_grad)
        self.train(linear.training)

    def extra_repr(self) -> str:
        """Global and local sizes, as `print(model)` shows them."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, local={tuple(self.weight.shape)}, "
            f"rank={self.rank}/{self.world_size}"
            + (", sequence_parallel=True" if self.sequence_parallel else "")
        )


def check_splittable(op: str, linear: nn.Module) -> None:
    """Raise TypeError unless `linear` computes exactly what nn.Linear does from a plain weight."""
    if isinstance(linear, ParallelLinear):
        raise TypeError(f"{op}: the layer is a {type(linear).__name__} already; split the original nn.Linear")
    if not isinstance(linear, nn.Linear):
        raise TypeError(f"{op}: expected an nn.Linear, got {type(linear).__name__}")
    kind = type(linear)
    known = (kind.__module__, kind.__name__) in SAME_AS_LINEAR
    if (kind.forward is not nn.Linear.forward and not known) or hasattr(linear, "parametrizations"):
        raise TypeError(
            f"{op}: {type(linear).__name__} has a forward or a weight of its own; only plain nn.Linear can "
            "be split (remove parametrizations, split before quantising or wrapping)"
        )


class ColumnParallelLinear(ParallelLinear):
    """Linear whose output features are split: Y_r = X W_r^T + b_r.

    x [.., in_features], equal on all ranks (or this rank's shard along `sequence_dim` with sequence_parallel)
    -> [.., out_features of this rank], or all of them with gather_output.
    weight [out_features of this rank, in_features], bias [out_features of this rank].
    dX is summed over the group (reduce-scattered with sequence_parallel); dW_r = dY_r^T X, db_r = sum dY_r.

    shard_sizes: output features per rank, default the convention of torch.chunk; empty shards work. shards:
    the general form, whose slices may overlap (the gradients of rows that several ranks hold are summed).
    return_bias: return (Y, bias) and leave the addition to the caller. forward(x, gather_size=S) names the
    whole length of the sequence when its shards are uneven.
    """

    split_dim = 0
    style = "column"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        group: Group = None,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        sequence_dim: int = SEQUENCE_DIM,
        return_bias: bool = False,
        shard_sizes: Sequence[int] | None = None,
        shards: Shards | None = None,
    ) -> None:
        super().__init__(
            in_features, out_features, bias, device, dtype, group,
            sequence_parallel, sequence_dim, return_bias, shards, shard_sizes,
        )  # fmt: skip
        if gather_output and self.shards.overlapping:
            raise ValueError(
                f"ColumnParallelLinear: gather_output needs every row on one rank, but shards "
                f"{self.shards} overlap"
            )
        self.gather_output = gather_output
        self.shared_input: SharedInput | None = None
        self.shared_place = 0
        self.sequence_length: SequenceLength | None = None
        self.reads_gathered = False  # with sequence_parallel: callers pass the whole sequence, not a shard

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        group: Group = None,
        *,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        sequence_dim: int = SEQUENCE_DIM,
        return_bias: bool = False,
        shard_sizes: Sequence[int] | None = None,
        shards: Shards | None = None,
    ) -> ColumnParallelLinear:
        """This rank's rows of `linear`, copied; dtype, device, requires_grad and train mode are kept.

        Raises TypeError for a subclass of nn.Linear whose forward or weight is its own (quantised,
        parametrized, already parallel): splitting it would be wrong.
        """
        check_splittable(cls.__name__, linear)
        module = cls(
            linear.in_features, linear.out_features, linear.bias is not None, "meta", linear.weight.dtype,
            group=group, gather_output=gather_output, sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim, return_bias=return_bias, shard_sizes=shard_sizes, shards=shards,
        )  # fmt: skip
        module._adopt(linear)
        return module

    def forward(  # type: ignore[override]
        self, x: Tensor, *, gather_size: int | None = None
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """x -> this rank's columns; see the class."""
        if self.shared_input is not None:
            out = self.shared_input.take(self.shared_place, x, gather_size)
        else:
            out = column_products([self], x, gather_size, is_gathered=self.reads_gathered)[0]
        if self.gather_output:
            out = gather_features(out, self.shards, self.group_name, self.world_size)
        if not self.return_bias:
            return out
        if self.gather_output and self.bias is not None:
            return out, gather_features(self.bias, self.shards, self.group_name, self.world_size)
        return out, self.bias


def gather_features(x: Tensor, shards: Shards, group_name: str, world_size: int) -> Tensor:
    """x [.., features of this rank] -> [.., all features]; grad: this rank's part."""
    if shards.is_chunk:
        return functional.gather_from_region(x, group=group_name, dim=-1, size=shards.total)
    # the collective knows torch.chunk's sizes only: gather slices of equal, padded length, then put the pieces of
    # every rank where they belong
    longest = max(shards.sizes)
    padded = nn.functional.pad(x, (0, longest - x.shape[-1]))
    gathered = functional.gather_from_region(padded, group=group_name, dim=-1, size=longest * world_size)
    parts: list[tuple[int, Tensor]] = []
    for rank, pieces in enumerate(shards.pieces):
        place = rank * longest
        for start, end in pieces:
            parts.append((start, gathered.narrow(-1, place, end - start)))
            place += end - start
    return torch.cat([part for _, part in sorted(parts, key=lambda part: part[0])], dim=-1)


class RowParallelLinear(ParallelLinear):
    """Linear whose input features are split: Y = sum over ranks of X_r W_r^T, plus b once.

    x [.., in_features of this rank] (all of them with input_is_parallel=False) -> [.., out_features], equal
    on all ranks, or this rank's chunk along `sequence_dim` with sequence_parallel.
    weight [out_features, in_features of this rank], bias [out_features], equal on all ranks.
    dX_r = dY W_r, dW_r = dY^T X_r, db = sum dY; with sequence_parallel dY is gathered first, so db is the
    full sum.

    shard_sizes: input features per rank, default the convention of torch.chunk; empty shards work.
    return_bias: return (Y, bias) and leave the addition to the caller.
    drop_input: on a rank with an empty shard, ignore the features that come in
    (attention with more ranks than heads).
    """

    split_dim = 1
    style = "row"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        group: Group = None,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        sequence_dim: int = SEQUENCE_DIM,
        return_bias: bool = False,
        shard_sizes: Sequence[int] | None = None,
        shards: Shards | None = None,
        drop_input: bool = False,
    ) -> None:
        super().__init__(
            in_features, out_features, bias, device, dtype, group,
            sequence_parallel, sequence_dim, return_bias, shards, shard_sizes,
        )  # fmt: skip
        if self.shards.overlapping:
            raise ValueError(
                f"RowParallelLinear: shards {self.shards} overlap, so features would count twice"
            )
        self.input_is_parallel, self.drop_input = input_is_parallel, drop_input

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        group: Group = None,
        *,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        sequence_dim: int = SEQUENCE_DIM,
        return_bias: bool = False,
        shard_sizes: Sequence[int] | None = None,
        shards: Shards | None = None,
        drop_input: bool = False,
    ) -> RowParallelLinear:
        """This rank's columns of `linear`, copied; dtype, device, requires_grad and train mode are kept.

        Raises TypeError for a subclass of nn.Linear whose forward or weight is its own (quantised,
        parametrized, already parallel): splitting it would be wrong.
        """
        check_splittable(cls.__name__, linear)
        module = cls(
            linear.in_features, linear.out_features, linear.bias is not None, "meta", linear.weight.dtype,
            group=group, input_is_parallel=input_is_parallel, sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim, return_bias=return_bias, shard_sizes=shard_sizes, shards=shards,
            drop_input=drop_input,
        )  # fmt: skip
        module._adopt(linear)
        return module

    def forward(  # type: ignore[override]
        self, x: Tensor
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """x -> the sum over the ranks; see the class."""
        if not self.input_is_parallel:
            x = self._own_features(x)
        elif self.drop_input and self.local_in_features == 0:
            x = x.narrow(-1, 0, 0)
        bias = None if self.return_bias else self.bias
        if self.sequence_parallel:
            out = functional.linear_reduce_scatter(
                x, self.weight, bias, group=self.group_name, scatter_dim=self.sequence_dim
            )
        else:
            out = functional.linear_all_reduce(x, self.weight, bias, group=self.group_name)
        if not self.return_bias:
            return out
        if self.bias is not None and self.sequence_parallel:
            # the caller adds it to a part of the sequence, so its gradient there is a part of the sum
            return out, functional.copy_to_region(self.bias, group=self.group_name)
        return out, self.bias

    def _own_features(self, x: Tensor) -> Tensor:
        if self.shards.is_chunk:
            return functional.scatter_to_region(x, group=self.group_name, dim=-1)
        return take(functional.copy_to_region(x, group=self.group_name), -1, self.shards.ranges(self.rank))
