"""Recognises routed experts, and proves on small numbers that cutting their features leaves their sum right."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..groups import GroupInfo
from ..modules.experts import (
    ExpertForm,
    ParallelExperts,
    expert_arguments,
    expert_form,
    expert_shards,
    without_hooks,
)
from ..modules.layout import take
from ..modules.region import InnerColumnLinear, InnerRowLinear, SumRegion
from ..modules.shard import Shards
from .plan import Block, Finish, Make, Place, Plan, Step
from .whole_sequence import WholeSequence

__all__ = ["find_experts"]

TOKENS, TOP_K, HIDDEN, FEATURES = 5, 2, 16, (8, 24)  # of the trial
TOLERANCE = 1e-4  # relative, fp32
GATED = ("gate_proj", "up_proj", "down_proj")


def find_experts(name: str, modules: dict[str, nn.Module], place: Place) -> Block | None:
    """The part of the plan for the routed experts `name` and the block that holds them; None for other modules.

    Every rank gets a part of the features of every expert; routers are replicated. Shared experts whose output
    the block adds to the routed sum are summed with it. Raises ValueError with the reason when the module says
    that it holds experts but cutting them is not known to be right.
    """
    module = modules[name]
    form = expert_form(module)
    if form is None:
        return None
    shards = expert_shards(_features(name, module, form), place.world_size)
    why = _inseparable(module, form)
    if why:
        raise ValueError(f"{name}: {why}")
    parent, _, child = name.rpartition(".")
    block = modules[parent]
    shared = [c for c, m in block.named_children() if c != child and _is_gated(m)]
    added = _try_block(name, block, child, shared[0] if len(shared) == 1 else "")
    steps = [Step(name, "experts", shards, _make_experts(form, shards))]
    finish: tuple[Finish, ...] = ()
    claimed: tuple[str, ...] = ()
    if added and not form.biased:
        claimed = (f"{parent}.{shared[0]}",)
        steps += _inner_steps(claimed[0])
        finish = (_JoinShared(parent, child, shared[0]),)
    whole = [
        f"{parent}.{inner}"
        for inner, m in block.named_modules()
        if inner.partition(".")[0] not in ("", child, *shared)
        and next(m.parameters(recurse=False), None) is not None
    ]
    if place.sequence_parallel:
        # routers see the whole sequence on every rank: nothing of theirs is to be summed
        steps += [Step(router, "replicated", make=_keep) for router in whole]
        finish = (*finish, WholeSequence(parent, cuts_output=True))
    reason = (
        f"shared experts of {parent} are not simply added to the routed ones"
        if shared and not claimed
        else ""
    )
    return Block(
        name,
        "feed_forward",
        tuple(steps),
        whole=tuple(whole),
        finish=finish,
        claimed=claimed,
        not_sequence=reason,
    )


def _features(name: str, module: nn.Module, form: ExpertForm) -> int:
    """Features of an expert; ValueError when the parameters are not those that the form says."""
    if getattr(module, "has_post_expert_norm", False):
        raise ValueError(f"{name}: a norm of the output of each expert needs all of it on one rank")
    shapes = {n: tuple(param.shape) for n, param in module.named_parameters()}
    down = shapes.get("down_proj", ())
    if len(down) != 3:
        raise ValueError(f"{name}: down_proj has shape {list(down)}, expected three dims, experts first")
    experts, (features, hidden) = down[0], (down[1:] if form.transposed else down[:0:-1])
    expected = _shapes(form, experts, hidden, features)
    if shapes != expected or getattr(module, "num_experts", None) != experts:
        raise ValueError(f"{name}: parameters {shapes}, expected {expected} for {experts} experts")
    return features


def _shapes(form: ExpertForm, experts: int, hidden: int, features: int) -> dict[str, tuple[int, ...]]:
    rows = features * (2 if form.gated else 1)
    shapes = {form.into: (experts, rows, hidden), "down_proj": (experts, hidden, features)}
    if form.transposed:
        shapes = {name: (e, b, a) for name, (e, a, b) in shapes.items()}
    biases = {f"{form.into}_bias": (experts, rows), "down_proj_bias": (experts, hidden)}
    return {**shapes, **(biases if form.biased else {})}


def _inseparable(module: nn.Module, form: ExpertForm) -> str:
    """Why the sum over parts of the features is not the whole; "" when it is, on small random numbers."""
    random = torch.Generator().manual_seed(0)
    experts = int(module.num_experts)  # type: ignore[arg-type]
    top_k = min(TOP_K, experts)
    shards = Shards.partition(FEATURES)
    params = {
        name: torch.randn(shape, generator=random)
        for name, shape in _shapes(form, experts, HIDDEN, shards.total).items()
    }
    x = torch.randn(TOKENS, HIDDEN, generator=random)
    indices = torch.stack([torch.randperm(experts, generator=random)[:top_k] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, top_k, generator=random)
    trial = without_hooks(module, children=True)
    if hasattr(module, "config"):
        trial.config = copy.copy(module.config)
        trial.config._experts_implementation = "eager"  # type: ignore[union-attr]
    try:
        whole = torch.func.functional_call(trial, params, (x, indices, weights))
        total = torch.zeros_like(whole)
        for rank in range(len(FEATURES)):
            own = {n: take(params[n], dim, cut.ranges(rank)) for n, (dim, cut) in form.cuts(shards).items()}
            rest = {n: torch.zeros_like(param) for n, param in params.items() if n not in own}
            total += torch.func.functional_call(trial, {**rest, **own}, (x, indices, weights))
    except Exception as error:  # whatever its forward asks for, it is not there in parts
        return f"the forward of {type(module).__name__} cannot be tried on parts of its features: {error}"
    if form.biased:
        shares = torch.zeros(TOKENS, experts).scatter_add(1, indices, weights)
        total += shares @ params["down_proj_bias"]
    if not _near(total, whole):
        return f"{type(module).__name__} does not sum over the features of its experts"
    return ""


def _near(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and bool((found - expected).norm() <= TOLERANCE * expected.norm())


@dataclass
class _Call:
    """What a stand-in was called with, and what it returned."""

    args: tuple[Any, ...]
    out: Tensor


class _StandIn(nn.Module):
    """Returns random numbers of the shape of its first input, and keeps what it was called with."""

    def __init__(self, names: tuple[str, ...], seed: int) -> None:
        super().__init__()
        self.names, self.seed = names, seed
        self.calls: list[_Call] = []

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        values = tuple(given[name] for name in self.names)
        random = torch.Generator().manual_seed(self.seed)
        out = torch.randn(values[0].shape, generator=random).to(values[0].dtype)
        self.calls.append(_Call(values, out))
        return out


def _try_block(name: str, block: nn.Module, experts: str, shared: str) -> bool:
    """Run the block with stand-ins for its experts: True when it returns what the two stand-ins return, added.

    Raises ValueError when the block cannot be run so, or calls its experts in another way: it may use their
    parameters itself.
    """
    trial = without_hooks(block, children=True)
    routed = _StandIn(expert_arguments(block._modules[experts]), seed=1)  # type: ignore[arg-type]
    other = _StandIn(("x",), seed=2)
    trial._modules[experts] = routed
    if shared:
        trial._modules[shared] = other
    down = block._modules[experts].down_proj  # type: ignore[union-attr]
    hidden = down.shape[2 if block._modules[experts].is_transposed else 1]  # type: ignore[union-attr]
    random = torch.Generator().manual_seed(3)
    x = torch.randn(1, TOKENS, hidden, generator=random).to(down.dtype)
    tensors = {**dict(trial.named_parameters()), **dict(trial.named_buffers())}
    values = {n: _like(tensor, random) for n, tensor in tensors.items()}
    try:
        with torch.no_grad():
            output = torch.func.functional_call(trial, values, (x.clone(),))
    except Exception as error:  # it wants more than hidden states, or more of its experts than a call
        raise ValueError(
            f"{name}: {type(block).__name__} cannot be tried with other experts: {error}"
        ) from None
    if len(routed.calls) != 1 or not _is_routing(routed.calls[0].args):
        raise ValueError(
            f"{name}: {type(block).__name__} calls its experts {len(routed.calls)} times, or not with hidden "
            "states, indices and weights"
        )
    if not shared or len(other.calls) != 1:
        return False
    y = output if isinstance(output, Tensor) else output[0]
    one_input = all(
        torch.equal(c.args[0].reshape(-1), x.reshape(-1)) for c in (routed.calls[0], other.calls[0])
    )
    added = routed.calls[0].out.reshape(y.shape) + other.calls[0].out.reshape(y.shape)
    return one_input and torch.equal(y, added)


def _like(tensor: Tensor, random: torch.Generator) -> Tensor:
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    return torch.randn(tensor.shape, generator=random).to(tensor.dtype)


def _is_routing(args: tuple[Any, ...]) -> bool:
    if len(args) != 3 or not all(isinstance(arg, Tensor) for arg in args):
        return False
    x, indices, weights = args
    return (
        x.dim() == 2
        and indices.shape == weights.shape
        and indices.shape[0] == x.shape[0]
        and not indices.is_floating_point()
        and weights.is_floating_point()
    )


def _is_gated(module: nn.Module) -> bool:
    """A gated feed-forward block of three linears without biases, and nothing else with parameters."""
    linears = [module._modules.get(child) for child in GATED]
    plain = all(type(linear) is nn.Linear and linear.bias is None for linear in linears)
    return plain and len(list(module.parameters())) == len(GATED)


def _keep(old: nn.Module, info: GroupInfo, plan: Plan) -> nn.Module:
    return old


def _make_experts(form: ExpertForm, shards: Shards) -> Make:
    def make(old: nn.Module, info: GroupInfo, plan: Plan) -> nn.Module:
        return ParallelExperts(old, form, shards, info.name)

    return make


def _inner_steps(shared: str) -> list[Step]:
    """The shared experts inside the region of the routed ones: no collective of their own."""
    gate, up, down = (f"{shared}.{child}" for child in GATED)
    return [
        Step(gate, "column_inner", make=_make_column),
        Step(up, "column_inner", make=_make_column),
        Step(down, "row_inner", make=_make_row),
    ]


def _make_column(old: nn.Module, info: GroupInfo, plan: Plan) -> nn.Module:
    assert isinstance(old, nn.Linear)
    return InnerColumnLinear.from_linear(old, info.name)


def _make_row(old: nn.Module, info: GroupInfo, plan: Plan) -> nn.Module:
    assert isinstance(old, nn.Linear)
    return InnerRowLinear.from_linear(old, info.name)


@dataclass(frozen=True)
class _JoinShared:
    """Joins routed and shared experts in one region, when all modules are in place."""

    block: str
    experts: str
    shared: str

    def __call__(self, model: nn.Module, info: GroupInfo) -> None:
        region = SumRegion(info.name)
        block = model.get_submodule(self.block)
        experts = block.get_submodule(self.experts)
        assert isinstance(experts, ParallelExperts)
        experts.region = region
        block.get_submodule(self.shared).register_forward_pre_hook(region.branch, with_kwargs=True)
        block.register_forward_hook(region.leave)
