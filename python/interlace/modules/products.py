"""Products of column-parallel linears that read one input: one gather (or one sum of dX) for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from .. import functional
from ..functional.regions import gathered_input
from .holders import sum_over_holders

if TYPE_CHECKING:
    from .linear import ColumnParallelLinear

__all__ = ["SharedInput", "column_products"]


def column_products(
    linears: Sequence[ColumnParallelLinear],
    x: Tensor,
    gather_size: int | None = None,
    *,
    is_gathered: bool = False,
) -> list[Tensor]:
    """x -> [product of every linear]; the linears agree in group, sequence_parallel and sequence_dim.

    gather_size: whole length of the sequence, needed when its shards are uneven. is_gathered: x is the whole
    sequence already, and its gradient is equal on all ranks.
    """
    first = linears[0]
    weights, biases = _parameters(linears)
    if first.sequence_parallel and not is_gathered:
        return functional.all_gather_linear(
            x, weights, biases, group=first.group_name, gather_dim=first.sequence_dim,
            gather_size=_whole_length(first, x, gather_size),
        )  # fmt: skip
    return functional.column_linear(x, weights, biases, group=first.group_name)


def gathered_products(
    linears: Sequence[ColumnParallelLinear], x: Tensor, gather_size: int | None = None
) -> tuple[list[Tensor], Tensor]:
    """As column_products, from shards of the sequence; also the gathered x, whose gradient is equal on all ranks."""
    first = linears[0]
    weights, biases = _parameters(linears)
    size = _whole_length(first, x, gather_size)
    outs, gathered = functional.all_gather_linear(
        x, weights, biases, group=first.group_name, gather_dim=first.sequence_dim, gather_size=size,
        return_gathered=True,
    )  # fmt: skip
    return outs, gathered_input(x, gathered, group=first.group_name, dim=first.sequence_dim, size=size)


def _parameters(linears: Sequence[ColumnParallelLinear]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Weights and biases; the gradients of rows that several ranks hold are summed."""
    first = linears[0]
    weights: list[Tensor] = [linear.matrix() for linear in linears]
    biases: list[Tensor | None] = [None if linear.return_bias else linear.bias for linear in linears]
    shared = [i for i, linear in enumerate(linears) if linear.shards.overlapping]
    if shared:
        held = sum_over_holders(
            [*(weights[i] for i in shared), *(biases[i] for i in shared)],
            [linears[i].shards for i in shared] * 2,
            group=first.group_name,
            rank=first.rank,
        )
        for place, i in enumerate(shared):
            weights[i] = cast(Tensor, held[place])
            biases[i] = held[len(shared) + place]
    return weights, biases


def _whole_length(linear: ColumnParallelLinear, x: Tensor, gather_size: int | None) -> int | None:
    if gather_size is None and linear.sequence_length is not None:
        return linear.sequence_length.of(x, linear.sequence_dim, linear.rank, linear.world_size)
    return gather_size


class SharedInput:
    """Model code calls q(x), k(x), v(x) one by one; the first call computes all products, the others pick
    theirs up.

    A product is handed out once, and only for the very tensor it was computed from, unchanged since, under
    the same grad mode and with the weight unchanged; any other call computes again. Results that nobody picks
    up live until the next call.
    """

    def __init__(self, linears: Sequence[ColumnParallelLinear]) -> None:
        self.linears = list(linears)
        self._key: Tensor | None = None
        self._states: list[tuple[int, ...]] = []
        self._products: dict[int, Tensor] = {}
        for place, linear in enumerate(self.linears):
            linear.shared_input, linear.shared_place = self, place

    def take(self, place: int, x: Tensor, gather_size: int | None) -> Tensor:
        """The product of x and the linear at `place`."""
        ready = place in self._products and self._key is x
        if not ready or self._states[place] != _state(x, self.linears[place].weight):
            self.compute(x, x, gather_size)
        product = self._products.pop(place)
        if not self._products:
            self._key = None
        return product

    def compute(self, x: Tensor, key: Tensor, gather_size: int | None) -> None:
        """Compute every product of x and keep them for calls with `key`."""
        whole = self.linears[0].reads_gathered and key is x
        self._keep(column_products(self.linears, x, gather_size, is_gathered=whole), key)

    def compute_gathered(self, x: Tensor, gather_size: int | None) -> Tensor:
        """Compute every product of the shard x and keep them for calls with the gathered x, which is returned."""
        products, gathered = gathered_products(self.linears, x, gather_size)
        self._keep(products, gathered)
        return gathered

    def _keep(self, products: list[Tensor], key: Tensor) -> None:
        self._products = dict(enumerate(products))
        self._key = key
        self._states = [_state(key, linear.weight) for linear in self.linears]

    def __getstate__(self) -> dict[str, Any]:
        """Without products: they belong to a forward, not to the layer."""
        return {"linears": self.linears, "_key": None, "_states": [], "_products": {}}


def _state(x: Tensor, weight: Tensor) -> tuple[int, ...]:
    """What must not change between the first call and a later one. A traced graph is straight code: nothing
    does.
    """
    if torch.compiler.is_compiling():
        return ()
    versions = [-1 if tensor.is_inference() else tensor._version for tensor in (x, weight)]
    return (*versions, torch.is_grad_enabled(), torch.is_autocast_enabled(x.device.type))
