"""interlace: collectives hidden inside matrix products, as drop-in parallel layers for PyTorch."""

from . import functional, modules, reference
from .errors import CollectiveAborted, CollectiveTimeout
from .groups import GroupInfo, destroy, init, resolve
from .memory import MemoryReport, memory_report
from .modules import ColumnParallelLinear, ParallelAttention, ParallelMLP, RowParallelLinear
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
    "PackedWeight",
    "ParallelAttention",
    "ParallelMLP",
    "Path",
    "Report",
    "RowParallelLinear",
    "__version__",
    "backend",
    "destroy",
    "functional",
    "init",
    "last_path",
    "memory_report",
    "modules",
    "pack_weights",
    "parallelize",
    "reference",
    "report",
    "resolve",
    "unpack_weights",
]
