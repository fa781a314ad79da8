"""interlace: collectives hidden inside matrix products, as drop-in parallel layers for PyTorch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import checkpoint, functional, modules, random, reference
from .checkpoint import full_grads, full_state_dict, load_full_state_dict, save_full
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
from .modules.clipping import clip_grad_norm_, install_total_norm, restore_total_norm
from .packing import PackedWeight, pack_weights, unpack_weights
from .parallelize import Report, parallelize, report, split_adapters
from .paths import Path, backend, last_path

if TYPE_CHECKING:
    from . import context_parallel, hf, styles
    from .planner import Layout, plan
    from .symm_mem_ops import provide_symm_mem_ops

__version__ = "0.1.0"

__all__ = [
    "CollectiveAborted",
    "CollectiveTimeout",
    "ColumnParallelLinear",
    "GroupInfo",
    "Layout",
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
    "checkpoint",
    "clip_grad_norm_",
    "context_parallel",
    "count_ops",
    "destroy",
    "full_grads",
    "full_state_dict",
    "functional",
    "hf",
    "init",
    "install_total_norm",
    "last_path",
    "load_full_state_dict",
    "memory_report",
    "modules",
    "pack_weights",
    "parallelize",
    "plan",
    "provide_symm_mem_ops",
    "random",
    "reference",
    "report",
    "resolve",
    "restore_total_norm",
    "save_full",
    "split_adapters",
    "styles",
    "unpack_weights",
]

# loaded when first named: they import DTensor, which takes half as long as torch itself, or the whole planner
_LATER = {
    "Layout": "planner",
    "context_parallel": "",
    "hf": "",
    "plan": "planner",
    "planner": "",
    "provide_symm_mem_ops": "symm_mem_ops",
    "styles": "",
}


if not TYPE_CHECKING:  # to a type checker a module with __getattr__ has every name

    def __getattr__(name: str) -> Any:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if not _LATER[name]:
            return importlib.import_module(f".{name}", __name__)
        return getattr(importlib.import_module(f".{_LATER[name]}", __name__), name)
