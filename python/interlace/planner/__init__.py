"""The planner: memory, time and exposed communication of a layout, from a model config and a cluster.

Formulas are pure Python; torch is imported only where a module on the meta device is read or a machine is measured.
"""

from __future__ import annotations

from . import communication, memory, model, pipeline
from .architecture import Architecture, read_architecture
from .cluster import Cluster, Device, Link, read_cluster, write_cluster
from .layout import Axis, Collective, Layout, ServingEstimate, StepTime
from .legality import DoesNotFit, layout_reasons
from .memory import MemoryBreakdown
from .search import plan
from .workload import Serving, Training

__all__ = [
    "Architecture",
    "Axis",
    "Cluster",
    "Collective",
    "Device",
    "DoesNotFit",
    "Layout",
    "Link",
    "MemoryBreakdown",
    "Serving",
    "ServingEstimate",
    "StepTime",
    "Training",
    "communication",
    "layout_reasons",
    "memory",
    "model",
    "pipeline",
    "plan",
    "read_architecture",
    "read_cluster",
    "write_cluster",
]
