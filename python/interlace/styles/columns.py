"""Linears that read one input (q, k, v; gate, up): one gather, or one sum of input gradients, for all of them."""

from __future__ import annotations

from typing import cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from ..modules.linear import check_splittable
from .linear import SEQUENCE_DIM, ColumnForward, ColumnLinear, SharedColumnInput
from .parameters import check_untouched

__all__ = ["QKV", "GateUp", "SharedColumns"]


class SharedColumns(ParallelStyle):
    """ColumnLinear for the named children of a module, which its forward calls with one and the same tensor.

    The first call computes all products; the others pick theirs up. Called with different tensors they are right too,
    and nothing is shared. Raises ValueError when a child is missing, TypeError when it is no plain nn.Linear, with the
    module unchanged.
    """

    def __init__(
        self, *names: str, sequence_parallel: bool = False, sequence_dim: int = SEQUENCE_DIM
    ) -> None:
        if len(names) < 2:
            raise ValueError(
                f"{type(self).__name__}: {names!r}; name two or more children that share an input"
            )
        self.names = names
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linears = [child_linear(type(self).__name__, module, name) for name in self.names]
        for linear in linears:
            style = ColumnLinear(sequence_parallel=self.sequence_parallel, sequence_dim=self.sequence_dim)
            style.src_data_rank = self.src_data_rank
            style._apply(linear, device_mesh)
        SharedColumnInput([cast(ColumnForward, linear.forward) for linear in linears])  # type: ignore[misc]
        return module


class QKV(SharedColumns):
    """SharedColumns for query, key and value of attention code that finds its local heads by itself."""

    def __init__(
        self,
        q: str = "q_proj",
        k: str = "k_proj",
        v: str = "v_proj",
        *,
        sequence_parallel: bool = False,
        sequence_dim: int = SEQUENCE_DIM,
    ) -> None:
        super().__init__(q, k, v, sequence_parallel=sequence_parallel, sequence_dim=sequence_dim)


class GateUp(SharedColumns):
    """SharedColumns for the two input projections of a gated feed-forward block."""

    def __init__(
        self,
        gate: str = "gate_proj",
        up: str = "up_proj",
        *,
        sequence_parallel: bool = False,
        sequence_dim: int = SEQUENCE_DIM,
    ) -> None:
        super().__init__(gate, up, sequence_parallel=sequence_parallel, sequence_dim=sequence_dim)


def child_linear(op: str, module: nn.Module, name: str) -> nn.Linear:
    """The child `name` of `module`; ValueError when there is none, TypeError when it cannot be split."""
    try:
        child = module.get_submodule(name)
    except AttributeError:
        children = ", ".join(child for child, _ in module.named_children()) or "none"
        raise ValueError(
            f"{op}: {type(module).__name__} has no child {name!r}; its children are: {children}"
        ) from None
    check_untouched(f"{op}: {name}", child)
    check_splittable(f"{op}: {name}", child)
    return cast(nn.Linear, child)
