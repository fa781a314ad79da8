"""The tensor-parallel plan that a Hugging Face model brings (`base_model_tp_plan` of its config).

It says which modules are split, and how, by the people who wrote the model. Heads are still cut by the structure of
the blocks, where that is understood: the plan knows no uneven heads, no shared key/value heads and no packed rows.
Where the structure is not understood the plan is carried out to the letter, as far as that must be right.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ..modules.shard import Shards
from .conv1d import linear_sizes
from .elementwise import why_not_elementwise
from .plan import ALIASES, Block, Place, Step, matches

__all__ = ["SOURCE", "hf_block", "hf_patterns", "source_of", "style_in"]

SOURCE = "base_model_tp_plan"
PACKED = {"packed_colwise": "column", "packed_rowwise": "row"}
ELSEWHERE = ("embedding_rowwise", "embedding_colwise", "replicate")  # nothing to split within a block


def hf_patterns(model: nn.Module) -> dict[str, str]:
    """{pattern of module names: style} of the model; empty when it brings none."""
    plan = getattr(model, "_tp_plan", None)
    if isinstance(plan, Mapping) and plan:
        return dict(plan)
    base = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    return dict(base) if isinstance(base, Mapping) else {}


def style_in(patterns: Mapping[str, str], name: str) -> str:
    """The style that a plan has for a module; "" when it has none."""
    return next((style for pattern, style in patterns.items() if matches(pattern, name)), "")


def source_of(step: Step, patterns: Mapping[str, str]) -> str:
    """Who decided that a module of a recognised block is split: the plan, the structure, or one against the other."""
    said = style_in(patterns, step.name)
    if not said:
        return "structure"
    style = PACKED.get(said, ALIASES.get(said, said))
    done = "column_gather_output" if step.style == "vocab_head" else step.style
    return SOURCE if style == done else f"structure ({SOURCE} says {said})"


def hf_block(
    name: str, modules: Mapping[str, nn.Module], patterns: Mapping[str, str], place: Place
) -> Block | None:
    """The block `name` as the plan has it, or None when the plan names nothing in it.

    Raises ValueError when carrying the plan out to the letter is not known to be right: heads cut in equal parts
    (they need not divide), features that are not taken one by one, a style for something else than linears and
    norms, parameters that the plan leaves out though they see a part. Linears whose outputs are gathered, and whose
    inputs are cut, are right whatever is between them.
    """
    prefix = f"{name}." if name else ""
    inside = {n: m for n, m in modules.items() if n.startswith(prefix) and _owns(m)}
    styles = {n: style_in(patterns, n) for n in inside}
    if not any(styles.values()):
        return None
    is_attention = "attn" in name.rpartition(".")[2] or "attention" in name.rpartition(".")[2]
    steps = [
        _step(n, inside[n], style, place) for n, style in styles.items() if style not in ("", *ELSEWHERE)
    ]
    if {step.style for step in steps} - {"column_gather_output", "row_split_input"}:
        left = [n for n, style in styles.items() if not style]
        if left:
            raise ValueError(f"{name}: {SOURCE} leaves out {left[0]}, which sees a part of the features")
        if is_attention:
            raise ValueError(
                f"{name}: {SOURCE} cuts its heads in equal parts, but how the forward of "
                f"{type(modules[name]).__name__} tells heads apart is not known"
            )
        _check_features(name, modules[name], steps, inside)
    return Block(
        name,
        "attention" if is_attention else "feed_forward",
        tuple(steps),
        whole=tuple(n for n, style in styles.items() if style in ("", *ELSEWHERE)),
        not_sequence=f"{name} is split by {SOURCE}, which knows no sequence shards",
    )


def _owns(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _step(name: str, module: nn.Module, said: str, place: Place) -> Step:
    style = PACKED.get(said, ALIASES.get(said, ""))
    sizes = linear_sizes(module)
    if style == "summed":
        return Step(name, style)
    if not style or sizes is None:
        raise ValueError(f"{name}: {SOURCE} says {said}, which is not known for a {type(module).__name__}")
    if said not in PACKED:
        return Step(name, style)
    total = sizes[1 if style == "column" else 0]
    half = Shards.chunk(total // 2, place.world_size)
    return Step(name, style, Shards.packed([half, half]))


def _check_features(name: str, module: nn.Module, steps: list[Step], inside: Mapping[str, nn.Module]) -> None:
    """What column linears give must be what row linears take, each feature by itself in between."""
    sizes = {step.name: linear_sizes(inside[step.name]) for step in steps}
    given = {size[1] for step in steps if step.style == "column" and (size := sizes[step.name])}
    taken = {size[0] for step in steps if step.style == "row" and (size := sizes[step.name])}
    if len(given | taken) > 1:
        raise ValueError(f"{name}: {SOURCE} splits linears of {sorted(given)} and {sorted(taken)} features")
    prefix = f"{name}." if name else ""
    ins, outs = (
        tuple(step.name.removeprefix(prefix) for step in steps if step.style == style)
        for style in ("column", "row")
    )
    why = (
        why_not_elementwise(module, ins, outs[0])
        if ins and len(outs) == 1
        else "it is not one pair of linears"
    )
    if why:
        raise ValueError(f"{name}: {SOURCE} splits its features, but {why}")
