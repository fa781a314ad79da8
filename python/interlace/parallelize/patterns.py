"""The plan written by the user: a dict of patterns of module names and styles."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from torch import nn

from .attention import find_attention
from .feed_forward import find_feed_forward
from .heads import attention_block
from .plan import ALIASES, STYLES, Place, Plan, Step, matches
from .vocabulary import VOCABULARY_STYLES, vocabulary_step

__all__ = ["dict_plan"]


def dict_plan(model: nn.Module, patterns: Mapping[str, str], place: Place) -> Plan:
    """{pattern of module names: style}. `*` stands for one part of a dotted name.

    Attention whose projections and output are all in the plan is cut by whole heads, by the rules of
    `split_heads`.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    plan = Plan(sequence_parallel=place.sequence_parallel)
    for pattern, given in patterns.items():
        style = ALIASES.get(given, given)
        if style not in STYLES:
            raise ValueError(
                f"parallelize: {pattern!r}: {given!r} is no style; expected one of {', '.join(STYLES)}"
            )
        names = [name for name in modules if matches(pattern, name)]
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
            elif style in VOCABULARY_STYLES:
                plan.add(vocabulary_step(name, style, modules[name]))
            else:
                plan.add(Step(name, style))
    if (plan.scatters or plan.gathers) and not place.sequence_parallel:
        raise ValueError("parallelize: scatter_sequence and gather_sequence need sequence_parallel=True")
    for name in modules:
        _use_heads(name, modules, plan, place)
    plan.sources = dict.fromkeys(plan.steps, "given plan")
    return plan


def _examples(model: nn.Module) -> list[str]:
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return names[:8] + (["..."] if len(names) > 8 else [])


def _use_heads(name: str, modules: dict[str, nn.Module], plan: Plan, place: Place) -> None:
    """Where the plan splits a whole block, cut attention by heads and packed halves each, instead of by rows."""
    try:
        attention = find_attention(name, modules, trusted=True)
        blocks = [
            None if attention is None else attention_block(attention, place),
            find_feed_forward(name, modules, place),
        ]
    except ValueError as reason:
        # only a warning: the user named the linears, and they may be no such block at all
        if any(step.startswith(f"{name}.") for step in plan.steps):
            warnings.warn(f"parallelize: {reason}; its linears are cut by features", stacklevel=4)
        return
    for block in blocks:
        linears = [step for step in block.steps if step.style in ("column", "row")] if block else []
        if block and all(s.name in plan.steps and plan.steps[s.name].style == s.style for s in linears):
            plan.add_block(block)
