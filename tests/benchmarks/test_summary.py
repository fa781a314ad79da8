"""The arithmetic of paired timings, on made-up times."""

from __future__ import annotations

import pytest

from interlace.bench.cores import spread
from interlace.bench.summary import Run, Timings, combine, order, percentile


def timings(**seconds: list[float]) -> Timings:
    return Timings({name: tuple(Run(s) for s in values) for name, values in seconds.items()})


def test_percentiles_interpolate_between_sorted_values():
    """Catches unsorted input taken as it comes, and an index that runs past the end."""
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([4.0, 1.0], 0.5) == 2.5
    assert percentile([5.0], 0.95) == 5.0
    assert percentile([float(i) for i in range(101)], 0.95) == 95.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_the_order_is_a_permutation_that_depends_on_seed_and_iteration_only():
    """Catches ranks that draw different orders, which deadlocks, and one fixed order, which is biased."""
    orders = [tuple(order(7, iteration, 5)) for iteration in range(50)]
    assert all(sorted(one) == [0, 1, 2, 3, 4] for one in orders)
    assert orders == [tuple(order(7, iteration, 5)) for iteration in range(50)]
    assert len(set(orders)) > 20
    assert orders != [tuple(order(8, iteration, 5)) for iteration in range(50)]


def test_every_second_order_is_the_one_before_backwards():
    """Catches A B A B, in which a drift of the machine weighs on B alone."""
    for iteration in range(0, 40, 2):
        assert order(3, iteration, 4) == order(3, iteration + 1, 4)[::-1]
    assert len({tuple(order(3, iteration, 4)) for iteration in range(0, 40, 2)}) > 8


def test_the_slowest_rank_counts_in_every_iteration():
    """Catches a mean over ranks, and the maximum of medians, which hides ranks that are slow in turn."""
    merged = combine([{"a": [Run(1.0), Run(5.0)]}, {"a": [Run(4.0, 0.1), Run(2.0)]}])
    assert [run.seconds for run in merged.runs["a"]] == [4.0, 5.0]
    assert [run.delay for run in merged.runs["a"]] == [0.1, 0.0]


def test_ranks_that_timed_other_variants_are_an_error():
    """Catches columns that are swapped between ranks without a word."""
    with pytest.raises(ValueError, match="rank 1 timed"):
        combine([{"a": [Run(1.0)]}, {"b": [Run(1.0)]}])


def test_iterations_that_lost_their_core_are_dropped():
    """Catches medians of somebody else's work: five of nine iterations waited for the core here."""
    runs = [Run(1.0)] * 6 + [Run(9.0, 0.5)] * 3
    summary = Timings({"a": tuple(runs)}).summary("a")
    assert (summary.median, summary.p95, summary.kept, summary.taken) == (1.0, 1.0, 6, 9)


def test_a_delay_within_the_cost_of_reading_it_is_kept():
    """Catches a threshold that throws every short collective away."""
    assert not Run(20e-6, 2e-6).preempted
    assert Run(20e-6, 4e-6).preempted
    assert not Run(1.0, 9e-3).preempted


def test_with_fewer_than_five_quiet_iterations_all_are_used_and_told():
    """Catches a median of one lucky run on a busy machine."""
    runs = [Run(1.0)] * 2 + [Run(3.0, 1.0)] * 8
    summary = Timings({"a": tuple(runs)}).summary("a")
    assert (summary.median, summary.kept, summary.taken) == (3.0, 2, 10)


def test_ratios_and_differences_are_taken_within_an_iteration():
    """Catches a ratio of medians: the machine slows down threefold halfway, both variants with it."""
    t = timings(a=[2.0, 2.0, 6.0, 6.0, 6.0], b=[1.0, 1.0, 3.0, 3.0, 9.0])
    assert t.ratio("a", "b") == 2.0
    assert t.difference("a", "b") == 1.0


def test_a_ratio_needs_both_variants_undisturbed():
    """Catches one variant's lost core counted as the other one's speed."""
    t = Timings({"a": (Run(2.0),) * 6, "b": (Run(1.0),) * 5 + (Run(50.0, 40.0),)})
    assert t.ratio("a", "b") == 2.0


def test_ranks_get_physical_cores_before_hyperthreads():
    """Catches two ranks on the two threads of one core, each at half speed."""
    assert spread([0, 1, 2, 3], ["0-1", "0-1", "2-3", "2-3"]) == [0, 2, 1, 3]
    assert spread([0, 1, 2, 3], ["0,2", "1,3", "0,2", "1,3"]) == [0, 1, 2, 3]
    assert spread([5], ["5"]) == [5]
