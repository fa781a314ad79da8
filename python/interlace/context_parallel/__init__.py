"""Context parallelism for models: batches whose sequence is split over ranks, and attention that spans the ranks."""

from .attention import ALGORITHMS, ContextAttention
from .batch import ShardedBatch, shard_batch
from .cache import ShardedKVCache
from .hugging_face import replace_attention
from .loss import global_mean
from .module import ContextParallelAttention
from .work import Work, work_of

__all__ = [
    "ALGORITHMS",
    "ContextAttention",
    "ContextParallelAttention",
    "ShardedBatch",
    "ShardedKVCache",
    "Work",
    "global_mean",
    "replace_attention",
    "shard_batch",
    "work_of",
]
