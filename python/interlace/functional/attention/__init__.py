"""Context-parallel attention: the sequence is split over the ranks of a group."""

from .api import (
    all_gather_attention,
    all_to_all_attention,
    context_attention_of_heads,
    hierarchical_attention,
    ring_attention,
)
from .decode import decode_attention
from .heads import head_shards
from .problem import Problem, visible_pairs_of
from .spans import LAYOUTS, Span, positions_of, spans_of, tokens_of

__all__ = [
    "LAYOUTS",
    "Problem",
    "Span",
    "all_gather_attention",
    "all_to_all_attention",
    "context_attention_of_heads",
    "decode_attention",
    "head_shards",
    "hierarchical_attention",
    "positions_of",
    "ring_attention",
    "spans_of",
    "tokens_of",
    "visible_pairs_of",
]
