"""Attention with q, k and v projections of their own, recognised by names, shapes and the source of its forward."""

from __future__ import annotations

from torch import nn

from .blocks import Attention, Projection
from .numbers import HEAD_DIM, NUM_HEADS, Heads, check_reads, config_numbers, own_numbers
from .source import ForwardReads, forward_reads

__all__ = ["find_separate", "head_norms"]

PROJECTIONS: tuple[tuple[str, str, str], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("wq", "wk", "wv"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
)
OUTPUTS = ("o_proj", "out_proj", "dense", "wo", "o", "out", "proj", "out_lin")
CROSS = (
    "encoder_attn",
    "EncDecAttention",
    "crossattention",
    "cross_attn",
)  # k and v read another input than q
# relative biases as in Raffel et al. 2020: an embedding of one column per head, made by the first layer (or by each)
# and passed on as position_bias, so that all of them hold the same heads
RELATIVE_BIAS = {"T5Attention", "MT5Attention", "UMT5Attention"}

SINKS = "sinks"  # a logit per head that takes part in the softmax and has no value (GPT-OSS)


def find_separate(name: str, modules: dict[str, nn.Module], *, trusted: bool) -> Attention | None:
    """The attention block held by module `name`, or None when it has no q, k, v of the known names.

    Raises ValueError as `find_attention` does.
    """
    module = modules[name]
    prefix = f"{name}." if name else ""
    found = next(filter(None, (_linears(modules, prefix, names) for names in PROJECTIONS)), None)
    if found is None:
        return None
    names = tuple(found)
    output, last = _output(name, prefix, modules)
    reads = forward_reads(module)
    if reads is None and not trusted:
        raise ValueError(f"{name}: the source of {type(module).__name__}.forward is not there to be checked")
    reads = reads or ForwardReads()
    heads = _heads(name, module, list(found.values()), output, last)
    biases = _relative_biases(module, heads)
    attributes, config = own_numbers(module, heads), config_numbers(module, reads, heads)
    if not trusted:
        changed = {("self", attr) for attr, _ in attributes} | {("self.config", attr) for attr, _ in config}
        known = ("position_bias",) if type(module).__name__ in RELATIVE_BIAS else ()
        check_reads(name, module, reads, heads, changed, known)
    sinks = vars(module)["_parameters"].get(SINKS)
    own = (SINKS,) if sinks is not None and sinks.shape == (heads.query,) else ()
    norms = head_norms(name, module, {*names, *biases, *own, output.removeprefix(prefix)}, heads.length)
    is_cross = name.rpartition(".")[2] in CROSS
    shared = _sharing(reads, names, prefix, is_cross)
    orders = ("query", "key_value", "key_value")
    return Attention(
        name,
        tuple(Projection(prefix + child, order) for child, order in zip(names, orders, strict=True)),
        output,
        heads.length,
        heads.query,
        heads.key_value,
        norms=norms,
        biases=tuple(prefix + child for child in biases),
        shared=shared,
        attributes=attributes,
        config=config,
        only_input=reads.only_input(names),
        own=own,
    )


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


def _heads(name: str, module: nn.Module, projections: list[nn.Linear], output: str, last: nn.Linear) -> Heads:
    query, key, value = projections
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
    return Heads(heads, kv_heads, head_dim)


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


def _relative_biases(module: nn.Module, heads: Heads) -> tuple[str, ...]:
    """Children that are relative biases of all heads, in the classes known to use them so."""
    child = getattr(module, "relative_attention_bias", None)
    known = type(module).__name__ in RELATIVE_BIAS and type(module).__module__.startswith("transformers.")
    is_plain = type(child) is nn.Embedding and child.max_norm is None and child.embedding_dim == heads.query
    return ("relative_attention_bias",) if known and is_plain else ()


def head_norms(name: str, module: nn.Module, known: set[str], head_dim: int) -> tuple[str, ...]:
    """Children that norm one head at a time; ValueError for anything else with parameters."""
    prefix = f"{name}." if name else ""
    for param_name in {name for name, _ in module.named_parameters(recurse=False)} - known:
        raise ValueError(f"{name}: parameter {param_name} is not known to be the same for all heads")
    norms = []
    for child_name, child in module.named_children():
        if child_name in known or next(child.parameters(), None) is None:
            continue
        own = list(child.parameters(recurse=False))
        if len(own) != len(list(child.parameters())) or any(param.numel() != head_dim for param in own):
            raise ValueError(
                f"{name}: {child_name} has parameters that are not one value per element of a head"
            )
        norms.append(prefix + child_name)
    return tuple(norms)


def _sharing(reads: ForwardReads, names: tuple[str, ...], prefix: str, is_cross: bool) -> tuple[str, ...]:
    """The projections that are called with one input: one variable, or two that are the same in self-attention."""
    if reads.input_of(names):
        return tuple(prefix + child for child in names)
    if reads.input_of(names[1:]):
        one_for_all = reads.input_of(names[:1]) and not is_cross
        return tuple(prefix + child for child in (names if one_for_all else names[1:]))
    return ()
