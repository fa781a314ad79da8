"""The plan: what happens to which module. Made from a dict of patterns, or from the blocks a model is built
of.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from ..modules import ParallelLinear, SummedGradients, split_heads
from ..modules.linear import check_splittable
from ..modules.shard import HeadLayout, Shards
from .blocks import Attention, FeedForward, find_attention, find_feed_forward

__all__ = ["STYLES", "Plan", "Step", "auto_plan", "dict_plan"]

STYLES = {
    "column": "nn.Linear cut by output features",
    "row": "nn.Linear cut by input features, outputs summed",
    "column_gather_output": "column, and every rank gets all output features",
    "row_split_input": "row, of an input that every rank has in full",
    "summed": "replicated module whose ranks see different data: gradients are summed",
    "scatter_sequence": "the first input of the module is cut along the sequence (with sequence_parallel)",
    "gather_sequence": "the output of the module is gathered along the sequence (with sequence_parallel)",
}
ALIASES = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "column_gather_output",
    "rowwise_split_input": "row_split_input",
    "replicated_with_grad_allreduce": "summed",
}
LINEAR_STYLES = ("column", "row", "column_gather_output", "row_split_input")


@dataclass(frozen=True)
class Step:
    """One module and its style; `shards` for linears that are not cut by the convention of torch.chunk."""

    name: str
    style: str
    shards: Shards | None = None


@dataclass
class Plan:
    """Everything `apply` will do. `shared`: linears of one input. `attributes`: new numbers for attention
    modules.

    With `sequence_parallel` linears read and write sequence shards; `scatters` and `gathers` are the modules
    whose input is cut and whose output is gathered, `stand_ins` the attention modules that compute q, k and v
    from the shards, with the name of their input and of one projection.
    """

    steps: dict[str, Step] = field(default_factory=dict)
    shared: list[tuple[str, ...]] = field(default_factory=list)
    attributes: dict[str, dict[str, int]] = field(default_factory=dict)
    scatters: list[str] = field(default_factory=list)
    gathers: list[str] = field(default_factory=list)
    stand_ins: dict[str, tuple[str, str]] = field(default_factory=dict)
    sequence_parallel: bool = False

    def add(self, step: Step) -> None:
        """Add a step; ValueError when the module has another style already."""
        before = self.steps.get(step.name)
        if before is not None and before.style != step.style:
            raise ValueError(
                f"parallelize: {step.name} would be both {before.style} and {step.style}; make the patterns "
                "disjoint"
            )
        self.steps[step.name] = step


def dict_plan(
    model: nn.Module, patterns: Mapping[str, str], rank: int, world_size: int, sequence_parallel: bool
) -> Plan:
    """The plan written by the user: {pattern of module names: style}. `*` stands for one part of a dotted
    name.

    Attention whose q, k, v and output are all in the plan is cut by whole heads, by the rules of
    `split_heads`.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    plan = Plan(sequence_parallel=sequence_parallel)
    for pattern, given in patterns.items():
        style = ALIASES.get(given, given)
        if style not in STYLES:
            raise ValueError(
                f"parallelize: {pattern!r}: {given!r} is no style; expected one of {', '.join(STYLES)}"
            )
        names = [name for name in modules if _matches(pattern, name)]
        if not names:
            raise ValueError(
                f"parallelize: pattern {pattern!r} matches no module; the modules are "
                f"{', '.join(_examples(model))}"
            )
        for name in names:
            if style == "scatter_sequence":
                plan.scatters.append(name)
            elif style == "gather_sequence":
                plan.gathers.append(name)
            else:
                plan.add(Step(name, style))
    if (plan.scatters or plan.gathers) and not sequence_parallel:
        raise ValueError("parallelize: scatter_sequence and gather_sequence need sequence_parallel=True")
    for name in modules:
        _use_heads(name, modules, plan, rank, world_size)
    return plan


def _matches(pattern: str, name: str) -> bool:
    parts, names = pattern.split("."), name.split(".")
    return len(parts) == len(names) and all(fnmatchcase(n, p) for n, p in zip(names, parts, strict=True))


def _examples(model: nn.Module) -> list[str]:
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return names[:8] + (["..."] if len(names) > 8 else [])


def _use_heads(name: str, modules: dict[str, nn.Module], plan: Plan, rank: int, world_size: int) -> None:
    """Where the plan splits a whole attention block, cut it by heads instead of by rows."""
    try:
        block = find_attention(name, modules, trusted=True)
    except ValueError as reason:
        # only a warning: the user named the linears, and they may be no attention at all
        if any(step.startswith(f"{name}.") for step in plan.steps):
            warnings.warn(
                f"parallelize: {reason}; its linears are cut by features, not by heads", stacklevel=4
            )
        return
    if block is None:
        return
    styles = [plan.steps[n].style if n in plan.steps else "" for n in (block.query, block.key, block.value)]
    if styles == ["column"] * 3 and block.output in plan.steps and plan.steps[block.output].style == "row":
        _add_attention(plan, block, rank, world_size)


def _add_attention(plan: Plan, block: Attention, rank: int, world_size: int) -> None:
    layout = split_heads(f"parallelize: {block.name}", block.num_heads, block.num_kv_heads, world_size)
    query, kv = layout.query.scaled(block.head_dim), layout.key_value.scaled(block.head_dim)
    plan.add(Step(block.query, "column", query))
    plan.add(Step(block.key, "column", kv))
    plan.add(Step(block.value, "column", kv))
    plan.add(Step(block.output, "row", layout.output.scaled(block.head_dim)))
    for norm in block.norms:
        plan.add(Step(norm, "summed"))
    if len(block.shared) > 1:
        plan.shared.append(block.shared)
    if plan.sequence_parallel and block.only_input:
        plan.stand_ins[block.name] = (block.only_input, block.query)
    plan.attributes[block.name] = {attr: _local(kind, layout, block, rank) for attr, kind in block.attributes}


def _local(kind: str, layout: HeadLayout, block: Attention, rank: int) -> int:
    heads, kv_heads = layout.local_heads(rank)
    numbers = {
        "heads": heads,
        "kv_heads": kv_heads,
        "groups": heads // kv_heads,
        "width": heads * block.head_dim,
    }
    return numbers[kind]


def auto_plan(model: nn.Module, rank: int, world_size: int, sequence_parallel: bool) -> Plan:
    """The plan for a model that is a stack of layers, each of attention and feed-forward blocks we know.

    Raises ValueError naming the first module that it does not know, or whose split is not known to be right.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    plan = Plan(sequence_parallel=sequence_parallel)
    reasons: list[str] = []
    attentions: dict[str, Attention] = {}
    for name in modules:
        try:
            block = find_attention(name, modules, trusted=False)
        except ValueError as reason:
            reasons.append(str(reason))
            continue
        if block is not None:
            attentions[name] = block
    stacks = _stacks(modules, attentions)
    if reasons or not stacks:
        why = reasons[0] if reasons else "no stack of layers with q, k, v projections was found"
        raise ValueError(_unknown(model, why))
    for block in attentions.values():
        _add_attention(plan, block, rank, world_size)
    for stack in stacks:
        _add_layers(model, plan, stack, modules, attentions)
    return plan


def _unknown(model: nn.Module, why: str) -> str:
    return (
        f"parallelize: {type(model).__name__} is not an architecture that plan='auto' knows: {why}. Pass "
        'plan={"layers.*.mlp.up": "column", "layers.*.mlp.down": "row", ...} with the names of its linears'
    )


def _stacks(modules: dict[str, nn.Module], attentions: dict[str, Attention]) -> list[str]:
    """Names of the innermost module lists whose every element holds attention."""
    stacks = []
    for name, module in modules.items():
        if isinstance(module, nn.ModuleList) and len(module):
            layers = [f"{name}.{i}." if name else f"{i}." for i in range(len(module))]
            if all(any(a.startswith(layer) for a in attentions) for layer in layers):
                stacks.append(name)
    return [s for s in stacks if not any(other != s and other.startswith(f"{s}.") for other in stacks)]


def _add_layers(
    model: nn.Module, plan: Plan, stack: str, modules: dict[str, nn.Module], attentions: dict[str, Attention]
) -> None:
    prefix = f"{stack}." if stack else ""
    inside = [name for name in modules if name.startswith(prefix)]
    for name in inside:
        try:
            block = find_feed_forward(name, modules)
        except ValueError as reason:
            raise ValueError(_unknown(model, str(reason))) from None
        if block is not None:
            _add_feed_forward(plan, block)
    _check_covered(model, plan, inside, modules)
    if plan.sequence_parallel:
        _add_sequence(
            model, plan, stack, modules, [a for a in attentions.values() if a.name.startswith(prefix)]
        )


def _add_feed_forward(plan: Plan, block: FeedForward) -> None:
    for name in block.ins:
        plan.add(Step(name, "column"))
    plan.add(Step(block.out, "row"))
    for name in block.activations:
        plan.add(Step(name, "summed"))
    if len(block.ins) > 1:
        plan.shared.append(block.ins)


def _check_covered(model: nn.Module, plan: Plan, inside: list[str], modules: dict[str, nn.Module]) -> None:
    """Every matrix inside the layers must be in the plan: what is not understood is refused, not left
    alone.
    """
    for name in inside:
        if name in plan.steps:
            continue
        for param_name, param in modules[name].named_parameters(recurse=False):
            if param.dim() > 1:
                what = f"{name}.{param_name} {list(param.shape)} of {type(modules[name]).__name__}"
                raise ValueError(_unknown(model, f"{what} is no part of a block it knows"))


def _add_sequence(
    model: nn.Module, plan: Plan, stack: str, modules: dict[str, nn.Module], attentions: list[Attention]
) -> None:
    """Cut the sequence before the first layer, gather it behind the last; in between norms see a shard
    each.
    """
    prefix = f"{stack}." if stack else ""
    for block in attentions:
        if not block.only_input:
            why = f"with sequence_parallel nothing but q, k and v may read the input of {block.name}"
            raise ValueError(_unknown(model, why))
    for name, module in modules.items():
        own = next(module.parameters(recurse=False), None)
        if name.startswith(prefix) and own is not None and name not in plan.steps:
            plan.add(Step(name, "summed"))
    plan.scatters.append(f"{prefix}0")
    last = max(int(name.removeprefix(prefix)) for name in modules if _matches(f"{prefix}*", name))
    plan.gathers.append(f"{prefix}{last}")


def check_plan(model: nn.Module, plan: Plan) -> None:
    """Raise ValueError or TypeError when a step cannot be done; after this `apply` does not fail."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, module in modules.items():
        if isinstance(module, ParallelLinear | SummedGradients):
            raise ValueError(
                f"parallelize: {name} is a {type(module).__name__} already; parallelize a model once"
            )
    for step in plan.steps.values():
        module = modules[step.name]
        if step.style in LINEAR_STYLES:
            check_splittable(f"parallelize: {step.name}", module)
            parent = modules[step.name.rpartition(".")[0]]
            if isinstance(parent, nn.MultiheadAttention):
                raise TypeError(
                    f"parallelize: {step.name} belongs to nn.MultiheadAttention, which reads its weight "
                    "without calling it; use interlace.modules.ParallelAttention"
                )
        elif step.style == "summed" and any(True for c in module.children() for _ in c.parameters()):
            raise ValueError(
                f"parallelize: {step.name} has children with parameters; name each of them as summed"
            )
    _check_ties(modules, plan)


def _check_ties(modules: dict[str, nn.Module], plan: Plan) -> None:
    """A parameter used in two places must be cut alike in both."""
    holders: dict[int, list[tuple[str, str]]] = {}
    for name, module in modules.items():
        style = plan.steps[name].style if name in plan.steps else "replicated"
        for param_name, param in module.named_parameters(recurse=False):
            holders.setdefault(id(param), []).append((f"{name}.{param_name}", style))
    for places in holders.values():
        styles = {style.partition("_")[0] for _, style in places}
        if len(styles) > 1 and styles & {"column", "row"}:
            told = ", ".join(f"{name} ({style})" for name, style in places)
            raise ValueError(f"parallelize: one tied parameter would be cut in different ways: {told}")
