"""Attention whose q, k and v are packed in one tensor. The order of its rows is nothing that names or shapes tell, so
only classes whose forward is known are recognised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from .blocks import Attention, Projection
from .conv1d import linear_sizes
from .numbers import HEAD_DIM, Heads, check_reads, config_numbers, own_numbers
from .separate import head_norms
from .source import ForwardReads, forward_reads

__all__ = ["find_packed"]


@dataclass(frozen=True)
class Packing:
    """How a class packs: names of its two linears, order of the rows (see `cut_heads`), what else depends on heads.

    `meanings`: attributes of its own that count heads. `arguments`: inputs with a value per head. `needs`: values
    that attributes must have, where another one runs other code. `chunks`: an attribute that counts parts of several
    heads each, which are cut like heads; `keeps`: numbers of all heads that are to stay.
    """

    qkv: str
    output: str
    order: str
    meanings: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    needs: Mapping[str, object] = field(default_factory=dict)
    chunks: str = ""
    keeps: tuple[str, ...] = ()


GPT2 = Packing("c_attn", "c_proj", "blocks", meanings={"split_size": "width", "embed_dim": "width"})
PACKINGS = {
    "Phi3Attention": Packing("qkv_proj", "o_proj", "blocks"),
    "GPTNeoXAttention": Packing("query_key_value", "dense", "groups"),
    "BloomAttention": Packing(
        "query_key_value", "dense", "groups",
        meanings={"hidden_size": "width"}, arguments=("alibi",), needs={"slow_but_exact": False},
    ),
    "FalconAttention": Packing("query_key_value", "dense", "groups", arguments=("alibi", "attention_mask")),
    "GPT2Attention": GPT2,
    "DecisionTransformerGPT2Attention": GPT2,
    "PersimmonAttention": Packing("query_key_value", "dense", "groups"),
    "GPTBigCodeAttention": Packing(  # one key/value head: groups are blocks
        "c_attn", "c_proj", "groups",
        meanings={"embed_dim": "width", "split_size": "width", "kv_dim": "kv_width", "kv_heads": "kv_heads"},
        needs={"is_cross_attention": False},
    ),
    "CodeGenAttention": Packing("qkv_proj", "out_proj", "groups", chunks="mp_num", keeps=("embed_dim",)),
    "MptAttention": Packing("Wqkv", "out_proj", "blocks", arguments=("position_bias",)),
}  # fmt: skip


def find_packed(name: str, modules: dict[str, nn.Module]) -> Attention | None:
    """The attention block held by module `name`, or None when its class is none of those known.

    Raises ValueError when it is one of them but not as it is known.
    """
    module = modules[name]
    packing = PACKINGS.get(type(module).__name__)
    if packing is None or not type(module).__module__.startswith("transformers.models."):
        return None
    prefix = f"{name}." if name else ""
    reads = forward_reads(module)
    if reads is None:
        raise ValueError(f"{name}: the source of {type(module).__name__}.forward is not there to be checked")
    for attr, value in packing.needs.items():
        if getattr(module, attr, value) != value:
            raise ValueError(
                f"{name}: with {attr}={getattr(module, attr)} its forward reads weights of its own"
            )
    heads, projections = _heads(name, module, packing)
    attributes = own_numbers(module, heads, packing.meanings)
    config = config_numbers(module, reads, heads)
    changed = {("self", attr) for attr in (*packing.keeps, *dict(attributes))} | {
        ("self.config", attr) for attr, _ in config
    }
    check_reads(name, module, reads, heads, changed, packing.arguments)
    known = {packing.output, *(projection.name for projection in projections)}
    return Attention(
        name,
        tuple(Projection(prefix + projection.name, projection.order) for projection in projections),
        prefix + packing.output,
        heads.length,
        heads.query,
        heads.key_value,
        norms=head_norms(name, module, known, heads.length),
        attributes=attributes,
        config=config,
        per_head_arguments=packing.arguments,
        only_input=_only_input(reads, projections),
    )


def _heads(name: str, module: nn.Module, packing: Packing) -> tuple[Heads, tuple[Projection, ...]]:
    """Heads, from the sizes of the linears; ValueError when these do not fit together."""
    sizes = {child: linear_sizes(linear) for child, linear in module.named_children()}
    qkv, output, query = (sizes.get(child) for child in (packing.qkv, packing.output, "q_attn"))
    length = next((n for a in HEAD_DIM if isinstance(n := getattr(module, a, None), int)), 0)
    if packing.chunks and output is not None:
        length = output[0] // getattr(module, packing.chunks)
    if qkv is None or output is None or not length:
        raise ValueError(
            f"{name}: {type(module).__name__} without {packing.qkv}, {packing.output} or head_dim"
        )
    if query is None:
        projections: tuple[Projection, ...] = (Projection(packing.qkv, packing.order),)
        rest = qkv[1] - output[0]
    else:  # cross attention: q has a linear of its own
        projections = (Projection("q_attn", "query"), Projection(packing.qkv, "key_value_blocks"))
        rest = qkv[1]
    heads, kv_heads = output[0] // length, rest // (2 * length)
    is_whole = heads * length == output[0] and kv_heads * 2 * length == rest
    if not is_whole or kv_heads < 1 or heads % kv_heads or (query is not None and query[1] != output[0]):
        raise ValueError(
            f"{name}: {packing.qkv} gives {qkv[1]} features and {packing.output} takes {output[0]}; not q, k and v "
            f"of whole heads of {length}"
        )
    return Heads(heads, kv_heads, length), projections


def _only_input(reads: ForwardReads, projections: tuple[Projection, ...]) -> str:
    """The input of the one projection; what it is called with in cross attention is none of self-attention's."""
    if len(projections) > 1:
        return ""
    return reads.only_input([projections[0].name], beside=("encoder_hidden_states",))
