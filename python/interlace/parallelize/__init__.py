"""Splits whole models over a group: plan, agreement of the ranks, swap in place, report."""

from .adapters import split_adapters
from .api import parallelize
from .plan import STYLES
from .report import Report, ReportRow, report

__all__ = ["STYLES", "Report", "ReportRow", "parallelize", "report", "split_adapters"]
