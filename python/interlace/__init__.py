"""interlace: collectives hidden inside matrix products, as drop-in parallel layers for PyTorch."""

from . import functional, reference
from .errors import CollectiveAborted, CollectiveTimeout
from .groups import GroupInfo, destroy, init, resolve
from .memory import memory_report
from .packing import PackedWeight, pack_weights, unpack_weights
from .paths import backend, last_path

__version__ = "0.1.0"

__all__ = [
    "CollectiveAborted",
    "CollectiveTimeout",
    "GroupInfo",
    "PackedWeight",
    "__version__",
    "backend",
    "destroy",
    "functional",
    "init",
    "last_path",
    "memory_report",
    "pack_weights",
    "reference",
    "resolve",
    "unpack_weights",
]
