"""Feed-forward blocks, recognised by the names and shapes of their linears, gate and up packed or not."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ..modules.shard import Shards
from .conv1d import linear_sizes
from .elementwise import why_not_elementwise
from .plan import Block, Place, Step
from .source import splits_in_halves

__all__ = ["find_feed_forward"]

FEED_FORWARDS = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("w1", "w3"), "w2"),
    (("gate", "up"), "down"),
    (("wi_0", "wi_1"), "wo"),
    (("up_proj",), "down_proj"),
    (("fc1",), "fc2"),
    (("up",), "down"),
    (("wi",), "wo"),
    (("lin1",), "lin2"),
    (("fc_in",), "fc_out"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("c_fc",), "c_proj"),
    (("intermediate_dense",), "output_dense"),
    (("gate_up_proj",), "down_proj"),
    (("intermediate.dense",), "output.dense"),
)


@dataclass(frozen=True)
class FeedForward:
    """Names of the linears that read the input, and of the one that writes the output.

    `activations` have parameters and see the features of one rank, so their gradients are summed. `halves`: gate and
    up are the halves of one linear.
    """

    name: str
    ins: tuple[str, ...]
    out: str
    features: int
    activations: tuple[str, ...]
    halves: bool


def find_feed_forward(name: str, modules: dict[str, nn.Module], place: Place) -> Block | None:
    """The feed-forward block held by module `name`, or None. ValueError when its parts do not fit
    together.
    """
    block = _find(name, modules)
    if block is None:
        return None
    one = Shards.chunk(block.features, place.world_size)
    shards = Shards.packed([one, one]) if block.halves else one
    steps = [Step(linear, "column", shards) for linear in block.ins]
    steps.append(Step(block.out, "row", one))
    steps += [Step(activation, "summed") for activation in block.activations]
    shared = (block.ins,) if len(block.ins) > 1 else ()
    return Block(name, "feed_forward", tuple(steps), shared=shared)


def _find(name: str, modules: dict[str, nn.Module]) -> FeedForward | None:
    prefix = f"{name}." if name else ""
    for ins, out in FEED_FORWARDS:
        linears = [modules.get(prefix + child) for child in (*ins, out)]
        sizes = [linear_sizes(linear) if linear is not None else None for linear in linears]
        if all(size is not None for size in sizes):
            break
    else:
        return None
    *first, last = (size for size in sizes if size is not None)
    halves = len(first) == 1 and first[0][1] == 2 * last[0]
    if any(out_features != last[0] * (1 + halves) for _, out_features in first):
        raise ValueError(f"{name}: {ins} give {[size[1] for size in first]} features, {out} takes {last[0]}")
    if halves and not splits_in_halves(modules[name]):
        raise ValueError(
            f"{name}: {ins[0]} gives twice the features that {out} takes, but the forward of "
            f"{type(modules[name]).__name__} is not known to cut them in two halves"
        )
    if not any("." in child for child in ins):
        why = why_not_elementwise(modules[name], ins, out)
        if why:
            raise ValueError(f"{name}: {why}")
    names = tuple(prefix + child for child in ins)
    return FeedForward(name, names, prefix + out, last[0], _between(name, modules, ins, out, last), halves)


def _between(
    name: str, modules: dict[str, nn.Module], ins: tuple[str, ...], out: str, last: tuple[int, int]
) -> tuple[str, ...]:
    """Activations with scalar parameters; ValueError for any other parameter that may see intermediate features."""
    activations = []
    for child_name, child in modules[name].named_modules():
        if child_name in ("", out, *ins):
            continue
        own = list(child.parameters(recurse=False))
        if any(param.numel() == last[0] != last[1] for param in own):
            raise ValueError(f"{name}: {child_name} works on all {last[0]} intermediate features at once")
        if own and "act" in child_name.rpartition(".")[2]:
            if any(param.numel() != 1 for param in own):
                raise ValueError(f"{name}: {child_name} has parameters that are not one for all features")
            activations.append(f"{name}.{child_name}" if name else child_name)
    return tuple(activations)
