"""Tensor parallelism of transformers on our ops: plans, loading, saving, adapters, generation stay as they are."""

from .registry import Enabled, disable, enable
from .table import Row, report

__all__ = ["Enabled", "Row", "disable", "enable", "report"]
