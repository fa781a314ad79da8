"""Styles for `torch.distributed.tensor.parallel.parallelize_module`: DTensor parameters, plain activations, our ops."""

from .attention import Attention
from .columns import QKV, GateUp, SharedColumns
from .embedding import VocabEmbedding
from .linear import ColumnLinear, RowLinear
from .replicated import Replicated, SequenceNorm

__all__ = [
    "QKV",
    "Attention",
    "ColumnLinear",
    "GateUp",
    "Replicated",
    "RowLinear",
    "SequenceNorm",
    "SharedColumns",
    "VocabEmbedding",
]
