"""Recognises attention over a latent (DeepSeek-V2 and later), and cuts it by heads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import nn

from ..groups import GroupInfo
from ..modules import split_heads
from ..modules.latent import LatentEntry, LatentLinear, LatentNorm, LatentQuery
from ..modules.region import InnerColumnLinear
from ..modules.shard import Shards
from .numbers import NUM_HEADS, NUM_KV_HEADS, SIZE_LIKE
from .plan import Block, Place, Plan, Step
from .source import forward_reads
from .whole_sequence import WholeSequence

__all__ = ["find_latent"]

LATENT, EXPAND, OUTPUT = "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"
QUERY_LATENT, QUERY_EXPAND, QUERY = "q_a_proj", "q_b_proj", "q_proj"
NORMS = ("kv_a_layernorm", "q_a_layernorm")
# sizes of the latents and of one head: a split of the heads leaves them
HARMLESS = (
    "qk_rope_head_dim", "qk_nope_head_dim", "qk_head_dim", "v_head_dim", "head_dim", "kv_lora_rank", "q_lora_rank",
    "hidden_size", "layer_idx",
)  # fmt: skip


def find_latent(name: str, modules: dict[str, nn.Module], place: Place) -> Block | None:
    """The part of the plan for latent attention in module `name`, None when it is none.

    The projections to the latents and their norms are replicated; the latents, what they share of the rotary key
    and the weights of the norms enter the region of the heads at once; the projections from the latents are cut
    by heads. Raises ValueError with the reason when it looks like latent attention but is not known to be right.
    """
    module = modules[name]
    if not all(isinstance(module._modules.get(child), nn.Linear) for child in (LATENT, EXPAND, OUTPUT)):
        return None
    has_query_latent = isinstance(module._modules.get(QUERY_LATENT), nn.Linear)
    query = QUERY_EXPAND if has_query_latent else QUERY
    first = QUERY_LATENT if has_query_latent else QUERY
    heads = _heads(name, module, query)
    norms = [norm for norm in NORMS if module._modules.get(norm) is not None]
    numbers = _check(name, module, heads, {LATENT, EXPAND, OUTPUT, query, first, *norms})
    layout = split_heads(f"parallelize: {name}", heads, heads, place.world_size)
    cut = {child: _rows(module, child, heads, layout.query) for child in (query, EXPAND)}
    steps = [
        Step(f"{name}.{LATENT}", "latent", make=_make_latent),
        *(Step(f"{name}.{norm}", "latent_norm", make=_make_norm) for norm in norms),
        Step(f"{name}.{EXPAND}", "column_inner", cut[EXPAND], partial(_make_inner, cut[EXPAND])),
        Step(f"{name}.{OUTPUT}", "row", layout.output.scaled(_length(module, OUTPUT, heads, "in_features"))),
    ]
    if has_query_latent:
        steps.append(Step(f"{name}.{QUERY_LATENT}", "latent", make=_make_latent))
        steps.append(
            Step(f"{name}.{QUERY_EXPAND}", "column_inner", cut[query], partial(_make_inner, cut[query]))
        )
    else:
        steps.append(Step(f"{name}.{QUERY}", "column_inner", cut[query], partial(_make_query, cut[query])))
    local = layout.local_heads(place.rank)[0]
    # the latents are of the whole sequence on every rank; the output projection cuts it again
    whole = (WholeSequence(name, cuts_output=False),) if place.sequence_parallel else ()
    return Block(
        name, "attention", tuple(steps), attributes=dict.fromkeys(numbers, local),
        finish=(_Join(name, (first, LATENT), tuple(norms)), *whole),
    )  # fmt: skip


def _heads(name: str, module: nn.Module, query: str) -> int:
    heads = next((n for attr in NUM_HEADS if isinstance(n := getattr(module, attr, None), int)), 0)
    sizes = [
        getattr(module._modules.get(child), attr, 0)
        for child, attr in ((query, "out_features"), (EXPAND, "out_features"), (OUTPUT, "in_features"))
    ]
    if not heads or any(not size or size % heads for size in sizes):
        raise ValueError(
            f"{name}: {query}, {EXPAND} and {OUTPUT} have {sizes} features; expected whole heads of {heads}"
        )
    return heads


def _check(name: str, module: nn.Module, heads: int, known: set[str]) -> list[str]:
    """Names of the attributes that count heads; ValueError for what a split of the heads may make wrong."""
    reads = forward_reads(module)
    if reads is None:
        raise ValueError(f"{name}: the source of {type(module).__name__}.forward is not there to be checked")
    for param, _ in module.named_parameters():
        if param.partition(".")[0] not in known or "." not in param:
            raise ValueError(f"{name}: {param} is not known in latent attention")
    numbers = [attr for attr in (*NUM_HEADS, *NUM_KV_HEADS) if vars(module).get(attr) == heads]
    widths = {
        heads,
        *(getattr(module._modules.get(child), "out_features", 0) for child in (EXPAND, QUERY_EXPAND)),
    }
    found = {f"self.{attr}": getattr(module, attr, None) for attr in reads.attributes - set(numbers)}
    found |= {
        f"self.config.{attr}": getattr(getattr(module, "config", None), attr, None) for attr in reads.config
    }
    for where, value in found.items():
        attr = where.rpartition(".")[2]
        if type(value) is int and value in widths and SIZE_LIKE.search(attr) and attr not in HARMLESS:
            raise ValueError(
                f"{name}: its forward reads {where}={value}, which a split of the heads would change"
            )
    return numbers


def _length(module: nn.Module, child: str, heads: int, attr: str = "out_features") -> int:
    length: int = getattr(module._modules[child], attr) // heads
    return length


def _rows(module: nn.Module, child: str, heads: int, shards: Shards) -> Shards:
    return shards.scaled(_length(module, child, heads))


def _make_latent(old: nn.Module, info: GroupInfo, plan: Plan) -> nn.Module:
    assert isinstance(old, nn.Linear)
    return LatentLinear(old)


def _make_norm(old: nn.Module, info: GroupInfo, plan: Plan) -> nn.Module:
    return LatentNorm(old, info.name)


def _make_inner(shards: Shards, old: nn.Module, info: GroupInfo, plan: Plan) -> nn.Module:
    assert isinstance(old, nn.Linear)
    return InnerColumnLinear.from_linear(old, info.name, shards=shards)


def _make_query(shards: Shards, old: nn.Module, info: GroupInfo, plan: Plan) -> nn.Module:
    assert isinstance(old, nn.Linear)
    return LatentQuery.from_linear(old, info.name, shards=shards)


@dataclass(frozen=True)
class _Join:
    """Lets what the heads share enter their region together, when all modules are in place."""

    block: str
    sources: tuple[str, ...]
    norms: tuple[str, ...]

    def __call__(self, model: nn.Module, info: GroupInfo) -> None:
        block = model.get_submodule(self.block)
        sources = [block.get_submodule(child) for child in self.sources]
        LatentEntry(sources, [block.get_submodule(child) for child in self.norms], info.name)  # type: ignore[arg-type]
