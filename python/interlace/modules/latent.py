"""Attention over a latent (DeepSeek-V2, 2024): what all heads share enters the region of the split heads at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .products import _state
from .region import InnerColumnLinear, enter_region
from .summed import SummedGradients

__all__ = ["LatentEntry", "LatentLinear", "LatentNorm", "LatentQuery"]


class LatentLinear(nn.Linear):
    """A replicated linear over the same parameters as `linear`, whose output is read by this rank's heads only.

    The gradient of the output is summed over the ranks, together with what else enters (`LatentEntry`); so that
    of its weight and of its input is whole on every rank.
    """

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._parameters = linear._parameters
        self.train(linear.training)
        self.entry: LatentEntry | None = None

    def entering(self, x: Tensor) -> Tensor:
        """What enters the region."""
        return F.linear(x, self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x -> the latent, inside the region."""
        return self.entering(x) if self.entry is None else self.entry.take(self, x)


class LatentQuery(InnerColumnLinear):
    """Column-parallel query projection without a latent of its own: its input enters with the latent of k and v."""

    entry: LatentEntry | None = None

    def entering(self, x: Tensor) -> Tensor:
        """What enters the region."""
        return x

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """x -> this rank's columns."""
        return super().forward(x if self.entry is None else self.entry.take(self, x))


class LatentNorm(SummedGradients):
    """A norm of a latent: replicated, its gradients summed together with what else enters the region."""

    entry: LatentEntry | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the norm returns."""
        params = None if self.entry is None else self.entry.take_parameters(self)
        if params is None:
            return super().forward(*args, **kwargs)
        return torch.func.functional_call(self.module, params, args, kwargs)


class LatentEntry:
    """One entry into the region of one attention block, so that its backward has one sum.

    sources are called with one and the same tensor: the first call computes all, and enters them and the
    parameters of `norms`; the others pick theirs up. A call with another tensor, or after a change of it, enters
    again, which costs a sum more and is right too.
    """

    def __init__(
        self, sources: Sequence[LatentLinear | LatentQuery], norms: Sequence[LatentNorm], group_name: str
    ) -> None:
        self.sources, self.norms, self.group_name = list(sources), list(norms), group_name
        self._key: Tensor | None = None
        self._states: list[tuple[int, ...]] = []
        self._entered: dict[int, Tensor] = {}
        self._params: dict[int, dict[str, Tensor]] = {}
        for member in (*self.sources, *self.norms):
            member.entry = self

    def take(self, source: LatentLinear | LatentQuery, x: Tensor) -> Tensor:
        """What `source` lets in, inside the region."""
        place = next(i for i, member in enumerate(self.sources) if member is source)
        ready = place in self._entered and self._key is x
        if not ready or self._states[place] != _state(x, source.weight):
            self._enter(x)
        entered = self._entered.pop(place)
        if not self._entered:
            self._key = None
        return entered

    def take_parameters(self, norm: LatentNorm) -> dict[str, Tensor] | None:
        """The parameters of `norm` inside the region; None when none are there, or gradients are off."""
        place = next(i for i, member in enumerate(self.norms) if member is norm)
        params = self._params.pop(place, None)
        return params if torch.is_grad_enabled() else None

    def _enter(self, x: Tensor) -> None:
        named = [
            (place, name, param)
            for place, norm in enumerate(self.norms)
            for name, param in norm.named_parameters(recurse=False)
        ]
        entering = [source.entering(x) for source in self.sources]
        entered = enter_region([*entering, *(param for _, _, param in named)], group=self.group_name)
        self._entered = dict(enumerate(entered[: len(entering)]))
        self._key = x
        self._states = [_state(x, source.weight) for source in self.sources]
        self._params = {place: {} for place in range(len(self.norms))}
        for (place, name, _), param in zip(named, entered[len(entering) :], strict=True):
            self._params[place][name] = param

    def __getstate__(self) -> dict[str, Any]:
        """Without tensors: they belong to a forward."""
        kept = {"sources": self.sources, "norms": self.norms, "group_name": self.group_name}
        return kept | {"_key": None, "_states": [], "_entered": {}, "_params": {}}
