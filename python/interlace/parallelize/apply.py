"""Carries a plan out: swaps linears in place, one by one, so that no more than one shard is held beside the
model.
"""

from __future__ import annotations

from torch import nn

from ..groups import GroupInfo
from ..modules import ColumnParallelLinear, RowParallelLinear, SharedInput, SummedGradients
from ..modules.sequence import SequenceLength
from .config_view import ConfigView
from .conv1d import is_conv1d, split_conv1d
from .dropout import add_dropout
from .plan import Plan, Step
from .sequence import DIM, GatherSequence, ScatterSequence, StandIn, WholeOutputs
from .whole_heads import gather_heads

__all__ = ["apply"]

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def apply(model: nn.Module, plan: Plan, info: GroupInfo) -> None:
    """Do every step of a checked plan. Names, dtypes, ties and hooks of parameters and modules stay."""
    modules = dict(model.named_modules(remove_duplicate=False))
    swapped: dict[int, nn.Module] = {}  # by the old module: one used in two places stays one
    tied: dict[int, nn.Parameter] = {}  # by the old parameter: one used in two places stays one
    for step in plan.steps.values():
        old = modules[step.name]
        if id(old) not in swapped:
            swapped[id(old)] = _replacement(old, step, plan, info)
            _tie(old, swapped[id(old)], tied)
        parent, _, child = step.name.rpartition(".")
        setattr(model.get_submodule(parent), child, swapped[id(old)])
    for names in plan.shared:
        linears = [model.get_submodule(name) for name in names]
        if linears[0].shared_input is None:
            SharedInput(linears)
    for name, numbers in plan.attributes.items():
        for attr, number in numbers.items():
            setattr(modules[name], attr, number)
    for name, numbers in plan.configs.items():
        modules[name].config = ConfigView(modules[name].config, numbers)
    for name, hooks in plan.pre_hooks.items():
        for hook in hooks:
            modules[name].register_forward_pre_hook(hook, with_kwargs=True)
    if plan.sequence_parallel:
        _cut_sequence(model, plan, info)
    for finish in plan.finishers:
        finish(model, info)
    add_dropout(model, plan, info)
    gather_heads(model, info)
    for module in model.modules():
        if hasattr(type(module), "_get_static_cache_init_shape"):
            # generate() would allocate a static cache for all heads; None makes it wait for the first keys
            object.__setattr__(module, "_get_static_cache_init_shape", _no_shape)


def _no_shape() -> None:
    return None


def _replacement(old: nn.Module, step: Step, plan: Plan, info: GroupInfo) -> nn.Module:
    if step.style == "summed":
        return SummedGradients(old, info.name)
    new = _split(old, step, plan, info)
    if isinstance(new, SummedGradients):
        return new  # it calls the old module, hooks and all
    for hooks in _HOOKS:
        getattr(new, hooks).update(getattr(old, hooks))
    return new


def _split(old: nn.Module, step: Step, plan: Plan, info: GroupInfo) -> nn.Module:
    if step.make is not None:
        return step.make(old, info, plan)
    if is_conv1d(old):
        return split_conv1d(old, step, plan, info)
    assert isinstance(old, nn.Linear)  # check_plan saw to it
    if step.style.startswith("column"):
        gather = step.style == "column_gather_output"
        return ColumnParallelLinear.from_linear(
            old, info.name, shards=step.shards, gather_output=gather,
            sequence_parallel=plan.sequence_parallel, sequence_dim=DIM,
        )  # fmt: skip
    return RowParallelLinear.from_linear(
        old, info.name, shards=step.shards, input_is_parallel=step.style == "row", drop_input=True,
        sequence_parallel=plan.sequence_parallel, sequence_dim=DIM,
    )  # fmt: skip


def _tie(old: nn.Module, new: nn.Module, tied: dict[int, nn.Parameter]) -> None:
    for name, param in old.named_parameters(recurse=False):
        if not isinstance(new, SummedGradients):
            setattr(new, name, tied.setdefault(id(param), getattr(new, name)))


def _cut_sequence(model: nn.Module, plan: Plan, info: GroupInfo) -> None:
    stacks = {name.rpartition(".")[0]: SequenceLength() for name in plan.scatters}
    if len(stacks) != len(plan.scatters) or stacks.keys() != {n.rpartition(".")[0] for n in plan.gathers}:
        stacks = {"": SequenceLength()}  # given by hand: one sequence for all

    def length_of(name: str) -> SequenceLength:
        inside = [stack for stack in stacks if not stack or f"{name}.".startswith(f"{stack}.")]
        return stacks[max(inside, key=len)] if inside else SequenceLength()

    for step in plan.steps.values():
        module = model.get_submodule(step.name)
        if hasattr(module, "sequence_length"):
            module.sequence_length = length_of(step.name)
    for name in plan.scatters:
        model.get_submodule(name).register_forward_pre_hook(
            ScatterSequence(length_of(name), info.name), with_kwargs=True
        )
        parts = name.split(".")
        for around in {".".join(parts[:count]) for count in range(len(parts))}:
            model.get_submodule(around).register_forward_pre_hook(WholeOutputs(), with_kwargs=True)
    for name in plan.gathers:
        model.get_submodule(name).register_forward_hook(
            GatherSequence(length_of(name), info.name, info.rank, info.world_size)
        )
    for name, (argument, projection) in plan.stand_ins.items():
        for linear in model.get_submodule(projection).shared_input.linears:
            linear.reads_gathered = True
        inner = projection.removeprefix(f"{name}." if name else "")
        hook = StandIn(length_of(name), argument, inner, info.rank, info.world_size)
        model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)
