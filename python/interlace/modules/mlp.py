"""Feed-forward block split over a group: column-parallel in, row-parallel out, one collective each way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..groups import Group
from .linear import SEQUENCE_DIM, ColumnParallelLinear, RowParallelLinear
from .products import SharedInput

__all__ = ["ParallelMLP"]

Activation: TypeAlias = str | Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


def _activation(name: Activation) -> Callable[[Tensor], Tensor]:
    if callable(name):
        return name
    if name not in ACTIVATIONS:
        raise ValueError(
            f"ParallelMLP: activation={name!r}; expected one of {', '.join(ACTIVATIONS)} or a callable that "
            "works element by element"
        )
    return ACTIVATIONS[name]


class ParallelMLP(nn.Module):
    """y = down(act(up(x))), or down(act(gate(x)) * up(x)) when gated, with the intermediate features split.

    x [.., hidden_size], equal on all ranks, -> y [.., out_features], equal on all ranks. With
    sequence_parallel x and y are this rank's shards along `sequence_dim` (torch.chunk convention; `forward(x,
    gather_size=S)` names the whole length when shards are uneven).
    Parameters: up_proj, down_proj and, gated, gate_proj. Gate and up share one gather and one sum of dX.
    Saves x and two or three activations of intermediate_size / world_size. activation must be element-wise: a
    rank sees only its features.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        out_features: int | None = None,
        *,
        activation: Activation = "gelu",
        gated: bool = False,
        bias: bool = True,
        group: Group = None,
        sequence_parallel: bool = False,
        sequence_dim: int = SEQUENCE_DIM,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation = _activation(activation)
        column = partial(
            ColumnParallelLinear, hidden_size, intermediate_size, bias, device, dtype,
            group=group, sequence_parallel=sequence_parallel, sequence_dim=sequence_dim,
        )  # fmt: skip
        self.gate_proj: ColumnParallelLinear | None = None
        if gated:
            self.gate_proj = column()
        self.up_proj = column()
        if self.gate_proj is not None:
            SharedInput([self.gate_proj, self.up_proj])
        self.down_proj = RowParallelLinear(
            intermediate_size, hidden_size if out_features is None else out_features, bias, device, dtype,
            group=group, sequence_parallel=sequence_parallel, sequence_dim=sequence_dim,
        )  # fmt: skip

    @classmethod
    def from_linears(
        cls,
        up: nn.Linear,
        down: nn.Linear,
        *,
        gate: nn.Linear | None = None,
        activation: Activation = "gelu",
        group: Group = None,
        sequence_parallel: bool = False,
        sequence_dim: int = SEQUENCE_DIM,
    ) -> ParallelMLP:
        """This rank's shards of an unsplit block's linears, copied. Raises ValueError when their sizes do not
        chain.
        """
        if down.in_features != up.out_features:
            raise ValueError(
                f"ParallelMLP: down takes {down.in_features} features, expected the {up.out_features} that up gives"
            )
        if gate is not None and gate.weight.shape != up.weight.shape:
            raise ValueError(
                f"ParallelMLP: gate has a weight {list(gate.weight.shape)}, expected {list(up.weight.shape)}, as up"
            )
        mlp = cls(
            up.in_features, 0, activation=activation, gated=gate is not None, group=group, device="meta"
        )
        column = partial(
            ColumnParallelLinear.from_linear,
            group=group, sequence_parallel=sequence_parallel, sequence_dim=sequence_dim,
        )  # fmt: skip
        mlp.up_proj = column(up)
        mlp.down_proj = RowParallelLinear.from_linear(
            down, group, sequence_parallel=sequence_parallel, sequence_dim=sequence_dim
        )
        if gate is not None:
            mlp.gate_proj = column(gate)
            SharedInput([mlp.gate_proj, mlp.up_proj])
        return mlp.train(up.training)

    def forward(self, x: Tensor, *, gather_size: int | None = None) -> Tensor:
        """x -> y; see the class."""
        hidden = self.activation((self.gate_proj or self.up_proj)(x, gather_size=gather_size))
        if self.gate_proj is not None:
            hidden = hidden * self.up_proj(x, gather_size=gather_size)
        out: Tensor = self.down_proj(hidden)
        return out
