"""nn.Linear by columns or by rows, for torch's parallelize_module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from .. import functional
from ..groups import GroupInfo, resolve
from ..modules.linear import check_splittable
from ..modules.products import SharedInput, _state
from .parameters import SplitForward, check_untouched, distribute, local

__all__ = ["ColumnForward", "ColumnLinear", "RowForward", "RowLinear", "SharedColumnInput"]

SEQUENCE_DIM = -2  # [.., sequence, features]; 0 for [sequence, batch, features]


class ColumnForward(SplitForward):
    """Y_r = X W_r^T + b_r for an nn.Linear whose weight and bias are cut by rows; see ColumnLinear."""

    style = "column"

    def __init__(
        self,
        module: nn.Module,
        info: GroupInfo,
        features: int,
        *,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        sequence_dim: int = SEQUENCE_DIM,
    ) -> None:
        super().__init__(module, info.name)
        self.features, self.gather_output = features, gather_output
        self.style = "column_gather_output" if gather_output else "column"
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim
        self.shared_input: SharedColumnInput | None = None
        self.shared_place = 0

    @property
    def weight(self) -> Tensor:
        """This rank's rows."""
        return cast(Tensor, local(self.module.weight))

    @property
    def bias(self) -> Tensor | None:
        """This rank's part."""
        return local(self.module.bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x -> this rank's columns, or all of them."""
        self.check_ties()
        if self.shared_input is not None:
            out = self.shared_input.take(self.shared_place, x, None)
        else:
            out = products([self], x)[0]
        if self.gather_output:
            out = functional.gather_from_region(out, group=self.group_name, dim=-1, size=self.features)
        return out


def products(columns: Sequence[ColumnForward], x: Tensor) -> list[Tensor]:
    """x -> [product of every linear]: one gather, or one sum of dX in the backward."""
    first = columns[0]
    weights, biases = [column.weight for column in columns], [column.bias for column in columns]
    if first.sequence_parallel:
        return functional.all_gather_linear(
            x, weights, biases, group=first.group_name, gather_dim=first.sequence_dim
        )
    return functional.column_linear(x, weights, biases, group=first.group_name)


class SharedColumnInput(SharedInput):
    """SharedInput for ColumnForwards."""

    def compute(self, x: Tensor, key: Tensor, gather_size: int | None) -> None:
        """Compute every product of x and keep them for calls with `key`."""
        columns = cast("list[ColumnForward]", self.linears)
        self._products = dict(enumerate(products(columns, x)))
        self._key, self._states = key, [_state(key, column.weight) for column in columns]


class ColumnLinear(ParallelStyle):
    """Output features of an nn.Linear split over the mesh: weight and bias Shard(0), in the convention of torch.chunk.

    x [.., in_features], equal on all ranks (with sequence_parallel this rank's shard of `sequence_dim`), ->
    [.., out_features of this rank], or all of them with gather_output. dX is summed over the mesh (reduce-scattered
    with sequence_parallel); dW_r = dY_r^T X, db_r = sum dY_r. Activations are plain tensors; names, global shapes and
    dtypes of parameters stay. Raises TypeError for anything but a plain nn.Linear, ValueError when it has a style or
    is tied to a parameter that was placed otherwise.
    """

    def __init__(
        self,
        *,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        sequence_dim: int = SEQUENCE_DIM,
    ) -> None:
        self.gather_output = gather_output
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_untouched("ColumnLinear", module)
        check_splittable("ColumnLinear", module)
        linear = cast(nn.Linear, module)
        forward = ColumnForward(
            linear, resolve(device_mesh), linear.out_features, gather_output=self.gather_output,
            sequence_parallel=self.sequence_parallel, sequence_dim=self.sequence_dim,
        )  # fmt: skip
        cut = {"weight": Shard(0), "bias": Shard(0)}
        distribute("ColumnLinear", linear, cut, device_mesh, self.src_data_rank, forward)
        return module


class RowForward(SplitForward):
    """Y = sum over ranks of X_r W_r^T, plus b once, for an nn.Linear whose weight is cut by columns; see RowLinear."""

    style = "row"

    def __init__(
        self,
        module: nn.Module,
        info: GroupInfo,
        *,
        split_input: bool = False,
        sequence_parallel: bool = False,
        sequence_dim: int = SEQUENCE_DIM,
    ) -> None:
        super().__init__(module, info.name)
        self.split_input = split_input
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim

    def __call__(self, x: Tensor) -> Tensor:
        """x -> the sum over the ranks."""
        self.check_ties()
        if self.split_input:
            x = functional.scatter_to_region(x, group=self.group_name, dim=-1)
        weight, bias = cast(Tensor, local(self.module.weight)), local(self.module.bias)
        if self.sequence_parallel:
            return functional.linear_reduce_scatter(
                x, weight, bias, group=self.group_name, scatter_dim=self.sequence_dim
            )
        return functional.linear_all_reduce(x, weight, bias, group=self.group_name)


class RowLinear(ParallelStyle):
    """Input features of an nn.Linear split over the mesh: weight Shard(1), bias Replicate (added once, full gradient).

    x [.., in_features of this rank] (all of them with split_input) -> [.., out_features], equal on all ranks, or this
    rank's chunk of `sequence_dim` with sequence_parallel. dX_r = dY W_r, dW_r = dY^T X_r. Activations are plain
    tensors; names, global shapes and dtypes of parameters stay. Raises as ColumnLinear does.
    """

    def __init__(
        self,
        *,
        split_input: bool = False,
        sequence_parallel: bool = False,
        sequence_dim: int = SEQUENCE_DIM,
    ) -> None:
        self.split_input = split_input
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_untouched("RowLinear", module)
        check_splittable("RowLinear", module)
        forward = RowForward(
            module, resolve(device_mesh), split_input=self.split_input,
            sequence_parallel=self.sequence_parallel, sequence_dim=self.sequence_dim,
        )  # fmt: skip
        cut = {"weight": Shard(1), "bias": Replicate()}
        distribute("RowLinear", module, cut, device_mesh, self.src_data_rank, forward)
        return module
