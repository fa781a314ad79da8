"""Routed experts split over a group: every rank holds a part of the features of every expert."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import functional
from ..groups import Group, resolve
from .layout import ParameterLayout, take
from .region import SumRegion, enter_region
from .shard import Shards, balanced_sizes
from .split import SplitModule
from .stand_in import StandIn

__all__ = ["ExpertForm", "ParallelExperts", "expert_form", "expert_shards"]

ROW_BYTES = 16  # grouped products ask that of a row of the weights
ALIGNMENT = ROW_BYTES // 2  # features: in bf16


def expert_shards(features: int, world_size: int) -> Shards:
    """The features of an expert over the ranks, in blocks as large as alignment wants and the ranks allow."""
    block = next(
        b for b in (ALIGNMENT, 4, 2, 1) if features % b == 0 and (features // b >= world_size or b == 1)
    )
    return Shards.partition(balanced_sizes(features // block, world_size)).scaled(block)


@dataclass(frozen=True)
class ExpertForm:
    """How a module stores its experts: parameters with the experts in dim 0.

    gated: one parameter holds gate and up, else there is only up. transposed: [E, in, out], else [E, out, in].
    interleaved: gate0, up0, gate1, up1, .., else all gates, then all ups. biased: both have a bias.
    """

    gated: bool
    transposed: bool
    interleaved: bool
    biased: bool

    @property
    def into(self) -> str:
        """Name of the parameter that reads the input."""
        return "gate_up_proj" if self.gated else "up_proj"

    def cuts(self, shards: Shards) -> dict[str, tuple[int, Shards]]:
        """Which dim of which parameter is cut, and how; `down_proj_bias` is whole on every rank."""
        into = shards
        if self.gated:
            into = shards.scaled(2) if self.interleaved else Shards.packed([shards, shards])
        cuts = {
            self.into: (2 if self.transposed else 1, into),
            "down_proj": (1 if self.transposed else 2, shards),
        }
        return cuts | ({f"{self.into}_bias": (1, into)} if self.biased else {})


class ParallelExperts(SplitModule, StandIn):
    """Y = sum over ranks of sum over k of w_k down_r(act(gate_up_r(x))), plus the routed bias of down once.

    Stands in for `module` and computes with its forward, on this rank's features: hidden states [T, H], indices
    [T, K] and weights [T, K] of the experts, equal on all ranks -> [T, H], equal on all ranks. Parameters keep
    their names; [E, 2 I, H] becomes [E, 2 I_r, H] (or its transpose), [E, H, I] becomes [E, H, I_r].
    Forward: one all-reduce of Y. Backward: one of dX and dw together (a second when dw is wider than dX).
    region: the sum, and the entry of x, are those of a block that adds more to Y.
    Ranks without features take part in the collectives only.
    """

    style = "experts"

    def __init__(self, module: nn.Module, form: ExpertForm, shards: Shards, group: Group = None) -> None:
        super().__init__()
        info = resolve(group)
        self.group_name, self.rank = info.name, info.rank
        self.form, self.shards = form, shards
        self.region: SumRegion | None = None
        self.arguments = expert_arguments(module)
        self.shapes = {name: tuple(param.shape) for name, param in module.named_parameters(recurse=False)}
        inner = without_hooks(module)
        for name, (dim, own) in form.cuts(shards).items():
            module._parameters[name] = _shard(module._parameters[name], dim, own, info.rank)
        inner._parameters = module._parameters
        _keep_aligned(inner, shards, info.rank)
        self._stand_in_for(inner)
        self.training = module.training

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """Hidden states, which experts, and how much of each -> the routed sum; see the class."""
        given = {**dict(zip(self.arguments, args, strict=False)), **kwargs}
        hidden_states, indices, weights = (given[name] for name in self.arguments)
        if self.region is not None:
            x, w = self.region.enter(hidden_states, weights)
        else:
            x, w = enter_region([hidden_states, weights], group=self.group_name)
        y = self._own_features(x, indices, w)
        if self.region is None:
            y = functional.reduce_from_region(y, group=self.group_name)
        return self._with_bias(y, indices, weights) if self.form.biased else y

    def _own_features(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        if self.shards.sizes[self.rank] == 0:
            empty = sum(self._parameters[name].sum() for name in self.form.cuts(self.shards))  # type: ignore[union-attr]
            # zeros that hang on x and the parameters: this rank's backward must meet the peers' sums
            return x.narrow(-1, 0, 0) @ x.new_zeros(0, x.shape[-1]) + empty
        replaced: dict[str, Tensor] = {}
        if self.form.biased:
            bias = self._parameters["down_proj_bias"]
            assert bias is not None
            replaced["down_proj_bias"] = bias.detach().new_zeros(1, 1).expand(bias.shape)
        out: Tensor = torch.func.functional_call(self.module, replaced, (x, indices, weights))
        return out

    def _with_bias(self, y: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Add what the biases of down give, outside the region: once, and with the whole gradient on every rank."""
        bias = self._parameters["down_proj_bias"]
        assert bias is not None
        shares = weights.new_zeros(weights.shape[0], bias.shape[0]).scatter_add(1, indices, weights)
        return y + (shares.to(bias.dtype) @ bias).to(y.dtype)

    def parameter_layouts(self) -> dict[str, ParameterLayout]:
        """Of the parameters that are cut."""
        return {
            name: ParameterLayout.of_shards(self.shapes[name], dim, shards, self.group_name)
            for name, (dim, shards) in self.form.cuts(self.shards).items()
        }

    def extra_repr(self) -> str:
        """The module it stands for, and this rank's part of the features."""
        return (
            f"{type(self.module).__name__}, features={self.shards.total}, "
            f"local={self.shards.sizes[self.rank]}, form={self.form}"
        )


@torch.no_grad()
def _shard(param: nn.Parameter | None, dim: int, shards: Shards, rank: int) -> nn.Parameter:
    assert param is not None
    mine = take(param.detach(), dim, shards.ranges(rank)).contiguous().clone()
    return nn.Parameter(mine, requires_grad=param.requires_grad)


def without_hooks(module: nn.Module, *, children: bool = False) -> nn.Module:
    """The same module over the same tensors, as a shallow copy that no hook of it is called for.

    children: those inside neither.
    """
    bare = copy.copy(module)
    for name, value in vars(module).items():
        if "_hooks" in name and isinstance(value, dict):
            bare.__dict__[name] = type(value)()
    if children:
        inside = module._modules.items()
        bare._modules = {n: None if c is None else without_hooks(c, children=True) for n, c in inside}
    return bare


def _keep_aligned(module: nn.Module, shards: Shards, rank: int) -> None:
    """Leave grouped products to shards whose rows are aligned as they ask; others go expert by expert, with a warning.

    They refuse rows that are no multiple of 16 bytes, so a shard may not go there when the whole could.
    """
    config = getattr(module, "config", None)
    way = getattr(config, "_experts_implementation", "eager")
    row = module.down_proj.element_size()  # type: ignore[operator, union-attr]
    if way == "eager" or shards.total * row % ROW_BYTES or shards.sizes[rank] * row % ROW_BYTES == 0:
        return
    warnings.warn(
        f"interlace: {shards.sizes[rank]} of {shards.total} features of an expert are not aligned to {ROW_BYTES} "
        f"bytes, so this rank computes expert by expert instead of by {way!r}; split over fewer ranks to avoid it",
        stacklevel=2,
    )
    module.config = copy.copy(config)
    module.config._experts_implementation = "eager"  # type: ignore[union-attr]


def expert_arguments(module: nn.Module) -> tuple[str, ...]:
    """What the forward calls its hidden states, indices and weights."""
    parameters = inspect.signature(inspect.unwrap(type(module).forward)).parameters
    return tuple(parameters)[1:4]


def expert_form(module: nn.Module) -> ExpertForm | None:
    """How `module` stores experts, by what it says of itself (transformers marks its experts); None: not experts."""
    marks: Mapping[str, Any] = vars(module)
    if not {"has_gate", "has_bias", "is_transposed", "is_concatenated"} <= marks.keys():
        return None
    return ExpertForm(
        gated=marks["has_gate"],
        transposed=marks["is_transposed"],
        interleaved=not marks["is_concatenated"],
        biased=marks["has_bias"],
    )
