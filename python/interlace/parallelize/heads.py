"""Attention cut by heads: which rows of every projection a rank holds, and the numbers that change with them."""

from __future__ import annotations

from functools import partial

from torch import nn

from ..groups import GroupInfo
from ..modules import split_heads
from ..modules.head_parameters import hold_heads
from ..modules.shard import HeadLayout, Range, Shards
from .alibi import OwnHeads
from .blocks import Attention
from .plan import Block, Place, Plan, Step
from .relative_bias import make_head_embedding

__all__ = ["attention_block", "cut_heads"]


def attention_block(block: Attention, place: Place) -> Block:
    """The part of the plan that splits `block`, by the rules of `split_heads`."""
    layout = split_heads(f"parallelize: {block.name}", block.num_heads, block.num_kv_heads, place.world_size)
    steps = [Step(p.name, "column", cut_heads(p.order, layout, block.head_dim)) for p in block.projections]
    steps.append(Step(block.output, "row", layout.output.scaled(block.head_dim)))
    steps += [Step(norm, "summed") for norm in block.norms]
    steps += [
        Step(bias, "head_columns", layout.query, make_head_embedding(layout.query)) for bias in block.biases
    ]
    if block.own:
        steps.append(Step(block.name, "head_parameters", layout.query, partial(_hold_heads, block, layout)))
    hooks: tuple[OwnHeads, ...] = ()
    if block.per_head_arguments:
        hooks = (OwnHeads(block.per_head_arguments, block.num_heads, layout.query.bounds(place.rank)),)
    shared = block.shared
    if place.sequence_parallel and block.only_input:
        shared = tuple(
            projection.name for projection in block.projections
        )  # even one: its product is made ahead
    return Block(
        block.name,
        "attention",
        tuple(steps),
        shared=(shared,) if shared else (),
        attributes={attr: _local(kind, layout, block, place.rank) for attr, kind in block.attributes},
        config={attr: _local(kind, layout, block, place.rank) for attr, kind in block.config},
        pre_hooks=hooks,
        stand_in=(block.only_input, block.projections[0].name) if block.only_input else None,
        not_sequence="" if block.only_input else f"nothing but q, k and v may read the input of {block.name}",
    )


def _hold_heads(
    block: Attention, layout: HeadLayout, old: nn.Module, info: GroupInfo, plan: Plan
) -> nn.Module:
    return hold_heads(old, block.own, layout.query, info.name)


def _local(kind: str, layout: HeadLayout, block: Attention, rank: int) -> int:
    heads, kv_heads = layout.local_heads(rank)
    numbers = {
        "heads": heads,
        "kv_heads": kv_heads,
        "groups": heads // kv_heads,
        "width": heads * block.head_dim,
        "kv_width": kv_heads * block.head_dim,
    }
    return numbers[kind]


def cut_heads(order: str, layout: HeadLayout, head_dim: int) -> Shards:
    """The rows of a projection that every rank holds.

    order: "query" or "key_value" for a projection of its own; "blocks" for all q, then all k, then all v in one
    tensor; "key_value_blocks" for all k, then all v; "groups" for [the q of a kv head, its k, its v] kv head by
    kv head.
    """
    query, kv = layout.query, layout.key_value
    if order == "groups":
        return _groups(layout).scaled(head_dim)
    blocks = {
        "query": (query,),
        "key_value": (kv,),
        "blocks": (query, kv, kv),
        "key_value_blocks": (kv, kv),
    }
    return Shards.packed(blocks[order]).scaled(head_dim)


def _groups(layout: HeadLayout) -> Shards:
    """In heads: a kv head with all the q heads that read it is one slice, with some of them it is two."""
    per_group = layout.query.total // layout.key_value.total
    size = per_group + 2
    pieces: list[tuple[Range, ...]] = []
    for rank in range(len(layout.query.sizes)):
        (first, last), (low, high) = layout.query.bounds(rank), layout.key_value.bounds(rank)
        if (first, last) == (low * per_group, high * per_group):
            pieces.append(((low * size, high * size),))
            continue
        start = low * size + first - low * per_group
        kv_start = low * size + per_group
        if start + last - first == kv_start:
            pieces.append(((start, kv_start + 2),))
        else:
            pieces.append(((start, start + last - first), (kv_start, kv_start + 2)))
    return Shards(layout.key_value.total * size, tuple(pieces))
