"""The ops as functions with gradients: what modules are made of, and what model code may call directly."""

from .attention import (
    all_gather_attention,
    all_to_all_attention,
    decode_attention,
    hierarchical_attention,
    ring_attention,
)
from .collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from .embedding import vocab_parallel_embedding
from .exchange import all_to_all_linear, linear_all_to_all
from .linear import all_gather_linear, column_linear, linear_all_reduce, linear_reduce_scatter
from .loss import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy
from .norm import linear_all_reduce_norm, linear_reduce_scatter_norm
from .regions import copy_to_region, gather_from_region, reduce_from_region, scatter_to_region
from .scaled import all_gather_linear_scaled, linear_reduce_scatter_scaled

__all__ = [
    "all_gather",
    "all_gather_attention",
    "all_gather_linear",
    "all_gather_linear_scaled",
    "all_reduce",
    "all_to_all",
    "all_to_all_attention",
    "all_to_all_linear",
    "column_linear",
    "copy_to_region",
    "decode_attention",
    "gather_from_region",
    "hierarchical_attention",
    "linear_all_reduce",
    "linear_all_reduce_norm",
    "linear_all_to_all",
    "linear_reduce_scatter",
    "linear_reduce_scatter_norm",
    "linear_reduce_scatter_scaled",
    "reduce_from_region",
    "reduce_scatter",
    "ring_attention",
    "scatter_to_region",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_embedding",
    "vocab_parallel_linear_cross_entropy",
]
