"""interlace: collectives hidden inside matrix products, as drop-in parallel layers for PyTorch."""

from . import functional, reference
from .errors import CollectiveAborted, CollectiveTimeout
from .groups import GroupInfo, destroy, init, resolve

__version__ = "0.1.0"

__all__ = [
    "CollectiveAborted",
    "CollectiveTimeout",
    "GroupInfo",
    "__version__",
    "destroy",
    "functional",
    "init",
    "reference",
    "resolve",
]
