"""The plan that needs no words: a model is a stack of layers, each made of blocks that are recognised."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from .attention import find_attention
from .experts import find_experts
from .feed_forward import find_feed_forward
from .heads import attention_block
from .hf_plan import hf_block, hf_patterns, source_of, style_in
from .latent import find_latent
from .plan import Block, Place, Plan, Step, matches
from .source import calls
from .vocabulary import add_vocabulary

__all__ = ["FINDERS", "Finder", "auto_plan"]

# None: not mine. ValueError: it looks like mine, but splitting it is not known to be right
Finder = Callable[[str, dict[str, nn.Module], Place], Block | None]

RESHAPES = ("view", "reshape", "flatten", "transpose", "permute", "unsqueeze", "squeeze")


def _attention(name: str, modules: dict[str, nn.Module], place: Place) -> Block | None:
    found = find_attention(name, modules, trusted=False)
    return None if found is None else attention_block(found, place)


FINDERS: tuple[Finder, ...] = (_attention, find_latent, find_feed_forward, find_experts)


def auto_plan(model: nn.Module, place: Place) -> Plan:
    """The plan for a model that is a stack of layers, each of attention and feed-forward blocks we know, or that the
    plan it brings (`base_model_tp_plan`) knows.

    Raises ValueError naming the first module that it does not know, or whose split is not known to be right.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    plan = Plan(sequence_parallel=place.sequence_parallel)
    blocks, reasons = _blocks(modules, place)
    patterns = hf_patterns(model)
    blocks += _planned(model, modules, patterns, blocks, reasons, place)
    attentions = [block for block in blocks if block.kind == "attention"]
    stacks = _stacks(modules, attentions)
    if not stacks:
        why = next(iter(reasons.values()), "no stack of layers with attention blocks was found")
        raise ValueError(_unknown(model, why))
    inside = tuple(f"{stack}." if stack else "" for stack in stacks)
    for name, reason in reasons.items():
        if name.startswith(inside):
            raise ValueError(_unknown(model, reason))
    for block in blocks:
        if block.name.startswith(inside):
            plan.add_block(block)
        elif block.kind == "attention":
            raise ValueError(_unknown(model, f"the attention block {block.name} is in no stack of layers"))
    for stack in stacks:
        _check_covered(model, plan, stack, modules)
        if place.sequence_parallel:
            _add_sequence(model, plan, stack, modules, blocks)
    add_vocabulary(model, plan, modules)
    plan.sources = {name: source_of(step, patterns) for name, step in plan.steps.items()}
    return plan


def _blocks(modules: dict[str, nn.Module], place: Place) -> tuple[list[Block], dict[str, str]]:
    """The blocks that are recognised, and by module the reason why one that looks like it is not."""
    blocks: list[Block] = []
    reasons: dict[str, str] = {}
    for name in modules:
        for finder in FINDERS:
            try:
                block = finder(name, modules, place)
            except ValueError as reason:
                reasons[name] = str(reason)
                break
            if block is not None:
                blocks.append(block)
    claimed = {name for block in blocks for name in block.claimed}
    return [block for block in blocks if block.name not in claimed], reasons


def _planned(
    model: nn.Module,
    modules: dict[str, nn.Module],
    patterns: dict[str, str],
    blocks: list[Block],
    reasons: dict[str, str],
    place: Place,
) -> list[Block]:
    """What no finder knows, as the plan that the model brings has it; a reason for what that cannot be done for."""
    known = tuple(f"{name}." for block in blocks for name in (block.name, *block.claimed))
    named = [name for name in modules if style_in(patterns, name) and not f"{name}.".startswith(known)]
    parents = {name.rpartition(".")[0] for name in named} | set(reasons)
    found: list[Block] = []
    for parent in sorted(parents):
        if not any(part.isdigit() for part in parent.split(".")):
            continue  # in no layer
        try:
            block = hf_block(parent, modules, patterns, place)
        except ValueError as problem:
            reasons[parent] = f"{reasons[parent]}; {problem}" if parent in reasons else str(problem)
            continue
        if block is not None:
            reasons.pop(parent, None)
            found.append(block)
    return found


def _unknown(model: nn.Module, why: str) -> str:
    return (
        f"parallelize: {type(model).__name__} is not an architecture that plan='auto' knows: {why}. Pass "
        'plan={"layers.*.mlp.up": "column", "layers.*.mlp.down": "row", ...} with the names of its linears'
    )


def _stacks(modules: dict[str, nn.Module], attentions: list[Block]) -> list[str]:
    """Names of the innermost module lists whose every element holds attention."""
    stacks = []
    for name, module in modules.items():
        if isinstance(module, nn.ModuleList) and len(module):
            layers = [f"{name}.{i}" if name else f"{i}" for i in range(len(module))]
            if all(any(f"{a.name}.".startswith(f"{layer}.") for a in attentions) for layer in layers):
                stacks.append(name)
    return [s for s in stacks if not any(other != s and other.startswith(f"{s}.") for other in stacks)]


def _check_covered(model: nn.Module, plan: Plan, stack: str, modules: dict[str, nn.Module]) -> None:
    """Every matrix inside the layers must be in the plan: what is not understood is refused, not left
    alone.
    """
    prefix = f"{stack}." if stack else ""
    for name, module in modules.items():
        if not name.startswith(prefix) or name in plan.steps or name in plan.whole:
            continue
        for param_name, param in module.named_parameters(recurse=False):
            if param.dim() > 1:
                what = f"{name}.{param_name} {list(param.shape)} of {type(module).__name__}"
                raise ValueError(_unknown(model, f"{what} is no part of a block it knows"))


def _add_sequence(
    model: nn.Module, plan: Plan, stack: str, modules: dict[str, nn.Module], blocks: list[Block]
) -> None:
    """Cut the sequence before the first layer, gather it behind the last; in between norms see a shard
    each.
    """
    prefix = f"{stack}." if stack else ""
    layers = [name for name in modules if matches(f"{prefix}*", name)]
    for block in blocks:
        if block.name.startswith(prefix) and block.not_sequence:
            raise ValueError(_unknown(model, f"with sequence_parallel {block.not_sequence}"))
    for name in layers:
        reshapes = sorted(calls(modules[name], RESHAPES))
        if reshapes:
            why = (
                f"with sequence_parallel {name} may not reshape its input, but it calls {', '.join(reshapes)}"
            )
            raise ValueError(_unknown(model, why))
    for name, module in modules.items():
        own = next(module.parameters(recurse=False), None)
        if name.startswith(prefix) and own is not None and name not in plan.steps:
            plan.add(Step(name, "summed"))
    plan.scatters.append(f"{prefix}0")
    last = max(int(name.removeprefix(prefix)) for name in layers)
    plan.gathers.append(f"{prefix}{last}")
