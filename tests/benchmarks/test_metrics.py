"""The arithmetic of the columns, on made-up times; and what the harness itself costs."""

from __future__ import annotations

import time

import pytest
import torch

from interlace.bench import measure
from interlace.bench.clock import WallClock, clock_for, tick
from interlace.bench.metrics import (
    bandwidth,
    bus_factor,
    figures,
    floor_ratio,
    overlap_efficiency,
    spread,
    teraflops,
)
from interlace.bench.operands import copies_for, turning
from interlace.bench.session import wanted
from interlace.bench.summary import Run, Timings
from interlace.bench.verdict import difference


def timings(**us: list[float]) -> Timings:
    return Timings(
        {name.replace("__", ":"): tuple(Run(u * 1e-6) for u in values) for name, values in us.items()}
    )


def test_bus_factors_are_those_of_nccl_tests():
    """Catches n in place of n - 1, and an all-gather counted twice."""
    assert bus_factor("all_reduce", 2) == 1.0
    assert bus_factor("all_reduce", 4) == 1.5
    assert bus_factor("all_reduce", 8) == 1.75
    for op in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        assert bus_factor(op, 4) == 0.75
    assert bus_factor("broadcast", 4) == bus_factor("reduce", 4) == 1.0
    assert bus_factor("all_reduce", 1) == 0.0
    with pytest.raises(ValueError, match="'gossip' on 2 ranks"):
        bus_factor("gossip", 2)


def test_rates_have_their_units():
    """Catches GiB for GB, and a factor of a thousand."""
    assert bandwidth(1_000_000, 1000.0) == 1.0  # 1 MB in 1 ms is 1 GB/s
    assert teraflops(10**9, 1000.0) == 1.0  # 1 GFLOP in 1 ms


def test_overlap_is_one_when_hidden_and_zero_when_exposed():
    """Catches the difference taken the wrong way round, and a division by a collective that takes no time."""
    assert overlap_efficiency(0.0, 20.0) == 1.0
    assert overlap_efficiency(20.0, 20.0) == 0.0
    assert overlap_efficiency(5.0, 20.0) == 0.75
    assert overlap_efficiency(30.0, 20.0) == -0.5
    assert overlap_efficiency(-2.0, 20.0) == 1.1
    assert overlap_efficiency(5.0, 0.0) is None
    assert overlap_efficiency(None, 20.0) is None


def test_the_floor_is_the_longer_part():
    """Catches a floor that adds what may overlap."""
    assert floor_ratio(30.0, 20.0, 10.0) == 1.5
    assert floor_ratio(30.0, 10.0, 20.0) == 1.5
    assert floor_ratio(30.0, None, None, 15.0) == 2.0
    assert floor_ratio(30.0, None, None) is None


def test_figures_are_paired_within_an_iteration():
    """Catches a ratio of medians: the machine slows down threefold halfway, all variants with it."""
    found = figures(
        timings(
            fused=[12.0, 12.0, 36.0, 36.0, 36.0], compute=[10.0, 10.0, 30.0, 30.0, 30.0],
            linear=[20.0, 20.0, 60.0, 60.0, 60.0], collective=[4.0, 4.0, 12.0, 12.0, 12.0],
            baseline=[24.0, 24.0, 72.0, 72.0, 72.0], unfused=[18.0, 18.0, 54.0, 54.0, 54.0],
        )
    )  # fmt: skip
    assert found["engine_ratio"] == pytest.approx(0.5)
    assert found["communication_ratio"] == pytest.approx(1.2)
    assert found["exposed_us"] == pytest.approx(6.0)  # 2, 2, 6, 6, 6
    assert found["overlap_efficiency"] == pytest.approx(0.5)  # 1 - 6 / 12
    assert found["x_floor"] == pytest.approx(1.2)
    assert found["speedup"] == pytest.approx(2.0)
    assert found["extra"]["unfused_ratio"] == pytest.approx(1.5)  # type: ignore[index]
    assert found["extra"]["linear_us"] == pytest.approx(60.0)  # type: ignore[index]


def test_speedups_compare_both_sides_at_their_best():
    """Catches a baseline whose ranks fell asleep counted as our speed."""
    found = figures(timings(fused=[10.0] * 5, baseline=[20.0, 20.0, 3000.0, 3000.0, 3000.0]))
    assert found["speedup"] == pytest.approx(2.0)
    assert found["baseline_us"] == pytest.approx(3000.0)
    assert "engine_ratio" not in found


def test_the_best_peer_is_named():
    """Catches the first peer, or the slowest, shown as what is to be beaten."""
    found = figures(timings(fused=[10.0] * 5, peer__mpi=[9.0] * 5, peer__deepspeed=[8.0] * 5))
    assert found["peer"] == "deepspeed"
    assert found["peer_us"] == pytest.approx(8.0)
    assert found["peer_speedup"] == pytest.approx(0.8)
    assert found["peers_us"] == pytest.approx({"mpi": 9.0, "deepspeed": 8.0})
    with pytest.raises(ValueError, match="'fused'"):
        figures(timings(baseline=[1.0]))


def test_spread_is_a_relative_standard_deviation():
    """Catches percent for a share; 0.8416 sigma lie between the median and the 20th percentile."""
    assert spread(100.0, 100.0 - 0.8416 * 5) == pytest.approx(0.05)
    assert spread(0.0, 0.0) == 0.0


def test_wrong_values_are_counted():
    """Catches NaN that compares as right, a wrong shape that is broadcast, a tolerance of each value alone."""
    want = torch.tensor([1.0, -100.0, 0.0, 2.0])
    assert difference(want + torch.tensor([0.5, 0.0, 0.0, 0.0]), want, 1e-2) == (0.005, 0)
    assert difference(want + torch.tensor([5.0, 0.0, 5.0, 0.0]), want, 1e-2) == (0.05, 2)
    assert difference(torch.tensor([1.0, float("nan"), 0.0, float("inf")]), want, 1e-2) == (float("inf"), 2)
    assert difference(torch.ones(2, 2), torch.ones(1), 1e-2) == (float("inf"), 4)
    assert difference(torch.ones(0), torch.ones(0), 0.0) == (0.0, 0)


def test_no_peers_leaves_the_baseline_alone():
    """Catches --no-peers that spends its time on parallelize_module and tp_plan all the same."""
    variants = dict.fromkeys(("fused", "baseline", "peer:tp_plan"), list)
    assert list(wanted(variants, {"peers": False})) == ["fused", "baseline"]
    assert list(wanted(variants, {})) == list(variants)


def test_the_cost_of_the_clock_is_taken_off():
    """Catches a collective of 5 us that is charged 0.1 us for being looked at, and times below zero."""
    clock = WallClock(overhead=1e-6)
    assert clock.read(3e-6) == pytest.approx(2e-6)
    assert clock.read(0.5e-6) == 0.0
    found = WallClock.calibrated()
    assert 0 < found.overhead < 2e-6
    assert 1e-10 < found.residual < 2e-6  # a coarse clock reads most calls of nothing alike: its tick is left
    assert tick([60e-9, 60e-9, 80e-9, 60.0000001e-9]) == pytest.approx(20e-9)


def test_the_harness_costs_less_than_one_percent_of_what_it_times():
    """Catches work of the harness inside the timed region: the call knows how long it took."""
    own: list[float] = []

    def call() -> None:
        begin = time.perf_counter()
        while time.perf_counter() - begin < 50e-6:
            pass
        own.append(time.perf_counter() - begin)

    clock = WallClock.calibrated()
    found = measure({"call": call}, iterations=201, warmup=0, barrier=lambda: None, clock=clock).runs["call"]
    extra = sorted(run.seconds - mine for run, mine in zip(found, own, strict=True))
    assert abs(extra[len(extra) // 2]) < 0.01 * 50e-6


def test_cold_operands_do_not_fit_a_cache_and_take_turns():
    """Catches cold weights that are read from the cache, and variants that each start at the first one."""
    from interlace.bench.operands import MOST_COPIES, cache_bytes

    size = 8 << 20
    assert copies_for(size, "hot") == 1
    assert copies_for(size, "cold") * size >= min(cache_bytes(), MOST_COPIES * size)
    assert copies_for(1, "cold") == MOST_COPIES
    take = turning("abc")
    assert [take() for _ in range(5)] == list("abcab")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_events_time_the_device_and_not_the_launch():
    """Catches a kernel that is timed by how long it takes to launch it."""
    x = torch.randn(4096, 4096, device="cuda")
    clock = clock_for("cuda")
    for _ in range(3):
        x @ x
    torch.cuda.synchronize()
    seconds = clock.read(clock.run(lambda: [x @ x for _ in range(10)]))
    begin = time.perf_counter()
    for _ in range(10):
        x @ x
    torch.cuda.synchronize()
    assert seconds == pytest.approx(time.perf_counter() - begin, rel=0.2)
