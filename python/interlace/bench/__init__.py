"""Timing shared by `interlace demo` and the scripts in benchmarks/: ranks, cores, paired runs, tables."""

from interlace.bench.cores import Placement, place, whole_machine
from interlace.bench.group import join, leave
from interlace.bench.machine import describe, one_line
from interlace.bench.paired import fitting_iterations, measure
from interlace.bench.processes import launch
from interlace.bench.summary import Run, Summary, Timings

__all__ = [
    "Placement",
    "Run",
    "Summary",
    "Timings",
    "describe",
    "fitting_iterations",
    "join",
    "launch",
    "leave",
    "measure",
    "one_line",
    "place",
    "whole_machine",
]
