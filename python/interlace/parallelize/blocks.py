"""Recognises attention and feed-forward blocks by the names, the shapes and the forward of their modules."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import nn

from .source import ForwardReads, forward_reads

__all__ = ["Attention", "FeedForward", "find_attention", "find_feed_forward"]

PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("wq", "wk", "wv"), ("q", "k", "v"))
OUTPUTS = ("o_proj", "out_proj", "dense", "wo", "o", "out", "proj")
FEED_FORWARDS = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("w1", "w3"), "w2"),
    (("gate", "up"), "down"),
    (("up_proj",), "down_proj"),
    (("fc1",), "fc2"),
    (("up",), "down"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("intermediate.dense",), "output.dense"),
)
HEAD_DIM = ("head_dim", "attention_head_size", "head_size", "d_head", "dim_head")
NUM_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
NUM_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
GROUPS = ("num_key_value_groups", "n_rep")
WIDTH = ("all_head_size", "inner_dim")
HARMLESS = (*HEAD_DIM, "layer_idx", "sliding_window")
SIZE_LIKE = re.compile(r"head|hidden|embed|dim|size|width|groups|rep")
PER_HEAD_ARGUMENTS = ("alibi", "position_bias", "head_mask", "relative_position")


@dataclass(frozen=True)
class Attention:
    """An attention block: names of its linears, its heads, and what must change with the heads a rank holds.

    `norms` see one head at a time, so their gradients differ between ranks. `shared` are the linears that
    read one input. `attributes` are numbers the forward reads, with their kind. `reads_input_once`: q, k, v
    share one input and nothing else uses its values.
    """

    name: str
    query: str
    key: str
    value: str
    output: str
    head_dim: int
    num_heads: int
    num_kv_heads: int
    norms: tuple[str, ...]
    shared: tuple[str, ...]
    attributes: tuple[tuple[str, str], ...]
    only_input: str


@dataclass(frozen=True)
class FeedForward:
    """A feed-forward block: names of the linears that read its input, and of the one that writes its output.

    `activations` have parameters and see the features of one rank, so their gradients are summed.
    """

    name: str
    ins: tuple[str, ...]
    out: str
    activations: tuple[str, ...]


def find_attention(name: str, modules: dict[str, nn.Module], *, trusted: bool) -> Attention | None:
    """The attention block held by module `name`, or None when it has no q, k, v of the known names.

    trusted: the user named its linears in a plan, so the forward is not questioned. Raises ValueError with
    the reason when the block looks like attention but splitting its heads is not known to be right.
    """
    module = modules[name]
    prefix = f"{name}." if name else ""
    found = next(filter(None, (_linears(modules, prefix, names) for names in PROJECTIONS)), None)
    if found is None:
        return None
    names = tuple(found)
    query, key, value = found.values()
    output, last = _output(name, prefix, modules)
    reads = forward_reads(module)
    if reads is None and not trusted:
        raise ValueError(f"{name}: the source of {type(module).__name__}.forward is not there to be checked")
    reads = reads or ForwardReads()
    head_dim = _head_dim(name, module, query)
    heads, kv_heads = query.out_features // head_dim, key.out_features // head_dim
    fits = (
        query.out_features == heads * head_dim == last.in_features
        and key.out_features == value.out_features == kv_heads * head_dim
        and kv_heads
        and heads % kv_heads == 0
    )
    if not fits:
        raise ValueError(
            f"{name}: q/k/v give {query.out_features}/{key.out_features}/{value.out_features} features and "
            f"{output} takes {last.in_features}; not whole heads of head_dim={head_dim}"
        )
    numbers = {
        **dict.fromkeys(NUM_HEADS, heads),
        **dict.fromkeys(NUM_KV_HEADS, kv_heads),
        **dict.fromkeys(GROUPS, heads // kv_heads),
        **dict.fromkeys(WIDTH, heads * head_dim),
    }
    attributes = [(attr, _kind(attr)) for attr, number in numbers.items() if vars(module).get(attr) == number]
    if not trusted:
        _check_reads(name, module, reads, {attr for attr, _ in attributes}, (heads, kv_heads, head_dim))
    norms = _head_norms(name, module, {*names, output.removeprefix(prefix)}, head_dim)
    shared = _sharing(reads, names, prefix)
    argument = reads.inputs.get(names[0], "")
    if len(shared) < 3 or argument in reads.other_uses or argument not in reads.parameters:
        argument = ""
    query_name, key_name, value_name = (prefix + child for child in names)
    return Attention(
        name, query_name, key_name, value_name, output, head_dim, heads, kv_heads,
        norms, shared, tuple(attributes), argument,
    )  # fmt: skip


def _linears(
    modules: dict[str, nn.Module], prefix: str, children: tuple[str, ...]
) -> dict[str, nn.Linear] | None:
    """The named children, when all of them are linears."""
    found: dict[str, nn.Linear] = {}
    for child in children:
        module = modules.get(prefix + child)
        if not isinstance(module, nn.Linear):
            return None
        found[child] = module
    return found


def _output(name: str, prefix: str, modules: dict[str, nn.Module]) -> tuple[str, nn.Linear]:
    sibling = f"{name.rpartition('.')[0]}.output.dense"
    for candidate in (*(prefix + child for child in OUTPUTS), sibling):
        module = modules.get(candidate)
        if isinstance(module, nn.Linear):
            return candidate, module
    raise ValueError(
        f"{name}: has q, k, v but no output projection ({', '.join(OUTPUTS)} or a sibling output.dense)"
    )


def _head_dim(name: str, module: nn.Module, query: nn.Linear) -> int:
    for attr in HEAD_DIM:
        length = getattr(module, attr, None)
        if isinstance(length, int):
            return length
    for attr in NUM_HEADS:
        heads = getattr(module, attr, None)
        if isinstance(heads, int) and heads and query.out_features % heads == 0:
            return query.out_features // heads
    raise ValueError(f"{name}: neither {HEAD_DIM[0]} nor {NUM_HEADS[0]} says how long a head is")


def _kind(attr: str) -> str:
    for kind, names in (("heads", NUM_HEADS), ("kv_heads", NUM_KV_HEADS), ("groups", GROUPS)):
        if attr in names:
            return kind
    return "width"


def _check_reads(
    name: str, module: nn.Module, reads: ForwardReads, changed: set[str], sizes: tuple[int, int, int]
) -> None:
    """Raise ValueError when the forward reads a number that a split would make wrong and that we do not
    change.
    """
    heads, kv_heads, head_dim = sizes
    global_sizes = {heads, kv_heads, heads * head_dim, kv_heads * head_dim}
    config = getattr(module, "config", None)
    found = [("self", attr, getattr(module, attr, None)) for attr in reads.attributes]
    found += [("self.config", attr, getattr(config, attr, None)) for attr in reads.config]
    for where, attr, value in found:
        is_size = isinstance(value, int) and not isinstance(value, bool) and value in global_sizes
        if is_size and SIZE_LIKE.search(attr) and attr not in changed and attr not in HARMLESS:
            raise ValueError(
                f"{name}: its forward reads {where}.{attr}={value}, which a split of the heads would change"
            )
    for argument in reads.parameters:
        if argument in PER_HEAD_ARGUMENTS:
            raise ValueError(f"{name}: its forward takes {argument}, which holds values for all heads")


def _head_norms(name: str, module: nn.Module, linears: set[str], head_dim: int) -> tuple[str, ...]:
    """Children that norm one head at a time; ValueError for anything else with parameters."""
    prefix = f"{name}." if name else ""
    for param_name, _ in module.named_parameters(recurse=False):
        raise ValueError(f"{name}: parameter {param_name} is not known to be the same for all heads")
    norms = []
    for child_name, child in module.named_children():
        if child_name in linears or next(child.parameters(), None) is None:
            continue
        own = list(child.parameters(recurse=False))
        if len(own) != len(list(child.parameters())) or any(param.numel() != head_dim for param in own):
            raise ValueError(
                f"{name}: {child_name} has parameters that are not one value per element of a head"
            )
        norms.append(prefix + child_name)
    return tuple(norms)


def _sharing(reads: ForwardReads, names: tuple[str, ...], prefix: str) -> tuple[str, ...]:
    """The projections that are called with one and the same variable."""
    inputs = [reads.inputs.get(child) for child in names]
    if inputs[0] is not None and len(set(inputs)) == 1:
        return tuple(prefix + child for child in names)
    if inputs[1] is not None and inputs[1] == inputs[2]:
        return tuple(prefix + child for child in names[1:])
    return ()


def find_feed_forward(name: str, modules: dict[str, nn.Module]) -> FeedForward | None:
    """The feed-forward block held by module `name`, or None. ValueError when its parts do not fit
    together.
    """
    prefix = f"{name}." if name else ""
    for ins, out in FEED_FORWARDS:
        found = _linears(modules, prefix, (*ins, out))
        if found is not None:
            break
    else:
        return None
    *first, last = found.values()
    if any(linear.out_features != last.in_features for linear in first):
        raise ValueError(
            f"{name}: {ins} give {[f.out_features for f in first]} features, {out} takes {last.in_features}"
        )
    return FeedForward(
        name, tuple(prefix + child for child in ins), prefix + out, _between(name, modules, ins, out, last)
    )


def _between(
    name: str, modules: dict[str, nn.Module], ins: tuple[str, ...], out: str, last: nn.Linear
) -> tuple[str, ...]:
    """Activations with scalar parameters; ValueError for any other parameter that may see intermediate features."""
    activations = []
    for child_name, child in modules[name].named_modules():
        if child_name in ("", out, *ins):
            continue
        own = list(child.parameters(recurse=False))
        if any(param.numel() == last.in_features != last.out_features for param in own):
            raise ValueError(
                f"{name}: {child_name} works on all {last.in_features} intermediate features at once"
            )
        if own and "act" in child_name.rpartition(".")[2]:
            if any(param.numel() != 1 for param in own):
                raise ValueError(f"{name}: {child_name} has parameters that are not one for all features")
            activations.append(f"{name}.{child_name}" if name else child_name)
    return tuple(activations)
