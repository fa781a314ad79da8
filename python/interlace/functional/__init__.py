"""The ops as functions with gradients: what modules are made of, and what model code may call directly."""

from .collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from .embedding import vocab_parallel_embedding
from .linear import all_gather_linear, column_linear, linear_all_reduce, linear_reduce_scatter
from .loss import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy
from .regions import copy_to_region, gather_from_region, reduce_from_region, scatter_to_region

__all__ = [
    "all_gather",
    "all_gather_linear",
    "all_reduce",
    "all_to_all",
    "column_linear",
    "copy_to_region",
    "gather_from_region",
    "linear_all_reduce",
    "linear_reduce_scatter",
    "reduce_from_region",
    "reduce_scatter",
    "scatter_to_region",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_embedding",
    "vocab_parallel_linear_cross_entropy",
]
