"""Timing shared by `interlace demo` and the scripts in benchmarks/: ranks, cores, paired runs, tables."""

from interlace.bench.cores import Placement, place, whole_machine
from interlace.bench.group import join, leave
from interlace.bench.machine import describe, one_line
from interlace.bench.paired import fitting_iterations, measure
from interlace.bench.processes import launch
from interlace.bench.summary import Run, Summary, Timings
from interlace.bench.topology import peer_read_bandwidth

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
    "peer_read_bandwidth",
    "place",
    "whole_machine",
]
