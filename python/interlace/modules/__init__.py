"""Parallel layers: nn.Linear split by columns or rows, feed-forward and attention blocks made of them."""

from .attention import ParallelAttention
from .cache import KVCache, StaticKVCache
from .cross_entropy import VocabParallelCrossEntropy
from .dropout import ParallelDropout
from .embedding import VocabParallelEmbedding, VocabParallelHead
from .experts import ParallelExperts
from .layout import ParameterLayout, layouts_of
from .linear import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from .mlp import ParallelMLP
from .products import SharedInput
from .sequence import SequenceLength
from .shard import HeadLayout, Shards, split_heads
from .summed import SummedGradients

__all__ = [
    "ColumnParallelLinear",
    "HeadLayout",
    "KVCache",
    "ParallelAttention",
    "ParallelDropout",
    "ParallelExperts",
    "ParallelLinear",
    "ParallelMLP",
    "ParameterLayout",
    "RowParallelLinear",
    "SequenceLength",
    "Shards",
    "SharedInput",
    "StaticKVCache",
    "SummedGradients",
    "VocabParallelCrossEntropy",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "layouts_of",
    "split_heads",
]
