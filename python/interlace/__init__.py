"""interlace: collectives hidden inside matrix products, as drop-in parallel layers for PyTorch."""

from . import functional, modules, random, reference
from .counting import OpCounts, count_ops
from .errors import CollectiveAborted, CollectiveTimeout
from .groups import GroupInfo, destroy, init, resolve
from .memory import MemoryReport, memory_report
from .modules import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelDropout,
    ParallelMLP,
    RowParallelLinear,
    VocabParallelCrossEntropy,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from .packing import PackedWeight, pack_weights, unpack_weights
from .parallelize import Report, parallelize, report
from .paths import Path, backend, last_path

__version__ = "0.1.0"

__all__ = [
    "CollectiveAborted",
    "CollectiveTimeout",
    "ColumnParallelLinear",
    "GroupInfo",
    "MemoryReport",
    "OpCounts",
    "PackedWeight",
    "ParallelAttention",
    "ParallelDropout",
    "ParallelMLP",
    "Path",
    "Report",
    "RowParallelLinear",
    "VocabParallelCrossEntropy",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "__version__",
    "backend",
    "count_ops",
    "destroy",
    "functional",
    "init",
    "last_path",
    "memory_report",
    "modules",
    "pack_weights",
    "parallelize",
    "random",
    "reference",
    "report",
    "resolve",
    "unpack_weights",
]
