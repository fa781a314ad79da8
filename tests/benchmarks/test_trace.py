"""Traces: what a rank did when, of real calls on real ranks, and as Chrome's JSON."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace import functional
from interlace._native import _C
from interlace.bench.row import Report
from interlace.bench.trace import LANES, Span, lane_seconds, native_spans, record, spans_of, text_of
from tests.distributed import run_distributed

ROWS, INNER, COLUMNS = 320, 96, 256


def operands(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(ROWS, INNER, generator=generator), torch.randn(COLUMNS, INNER, generator=generator)


def traced(rank: int, world_size: int) -> dict[str, list[Span]]:
    name = interlace.resolve(None).name
    x, weight = operands(rank)
    y = x @ weight.T
    with torch.no_grad():
        return {
            "gemm_all_reduce": record(
                lambda: functional.linear_all_reduce(x, weight, group=name), name, "fused"
            ),
            "gemm_reduce_scatter": record(
                lambda: functional.linear_reduce_scatter(x, weight, group=name), name
            ),
            "all_gather_gemm": record(lambda: functional.all_gather_linear(x, weight, group=name), name),
            "all_reduce": record(lambda: functional.all_reduce(y, group=name), name),
            "torch": record(lambda: dist.all_reduce(torch.nn.functional.linear(x, weight)), name, "gloo"),
        }


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_traced_call_has_its_pieces_inside_it_on_every_rank(world_size: int):
    """Catches clocks that differ between ranks, pieces of another call, and a lane that is never filled."""
    traces = run_distributed(world_size, traced)[0]
    for op in ("gemm_all_reduce", "gemm_reduce_scatter", "all_gather_gemm", "all_reduce"):
        spans = [span for span in traces[op] if span.op == op]
        assert {span.rank for span in spans} == set(range(world_size)), op
        for rank in range(world_size):
            mine = [span for span in spans if span.rank == rank]
            calls = [span for span in mine if span.name == "call"]
            pieces = [span for span in mine if span.name != "call"]
            assert len(calls) == len({span.epoch for span in mine}), op
            assert {"signal"} <= {span.name for span in pieces}, op
            for call in calls:
                inside = [span for span in pieces if span.epoch == call.epoch]
                assert all(call.begin_ns <= s.begin_ns <= s.end_ns <= call.end_ns for s in inside), op
            assert sum(span.seconds for span in pieces) <= sum(call.seconds for call in calls) * 1.001
    begins = [min(s.begin_ns for s in traces["all_reduce"] if s.rank == r) for r in range(world_size)]
    ends = [max(s.end_ns for s in traces["all_reduce"] if s.rank == r) for r in range(world_size)]
    assert max(begins) < min(ends), "a collective ends on no rank before it began on all"


def test_products_sums_and_pulls_are_those_of_the_schedule():
    """Catches tiles that are recorded twice or not at all: 320 rows are two blocks, 256 columns are 2 x n panels."""
    spans = run_distributed(2, traced)[0]["gemm_all_reduce"]
    for rank in range(2):
        mine = [span for span in spans if span.rank == rank and span.op == "gemm_all_reduce"]
        for_peer = [s for s in mine if s.name == "product" and s.peer == 1 - rank]
        pulled = [s for s in mine if s.name == "pull"]
        assert len(for_peer) == len(pulled) > 0
        assert all(span.peer == 1 - rank for span in pulled)
        assert any(span.name == "sum" for span in mine)
        assert {span.lane for span in mine} >= {"call", "compute", "publish", "reduce"}


def test_torch_ops_and_its_collectives_have_lanes_of_their_own():
    """Catches a baseline that seems to do nothing, and gloo's time taken for compute."""
    spans = run_distributed(2, traced)[0]["torch"]
    for rank in range(2):
        mine = [span for span in spans if span.rank == rank]
        assert [s.lane for s in mine if s.name == "aten::linear"] == ["compute"]
        assert any(s.lane == "wait" and "all" in s.name for s in mine)
        assert all(s.variant == "gloo" for s in mine)


def full(rank: int, world_size: int) -> str:
    name = interlace.resolve(None).name
    with pytest.raises(ValueError, match="did not fit"), native_spans(name, rank, capacity=2):
        functional.all_reduce(torch.ones(8), group=name)
        functional.all_reduce(torch.ones(8), group=name)
    assert _C.stop_trace(name) == ([], 0)
    with pytest.raises(ValueError, match="capacity=0"):
        _C.start_trace(name, 0)
    with native_spans(name, rank) as spans:
        pass
    with pytest.raises(KeyError, match="no symmetric memory"), native_spans("nobody", rank):
        pass
    return str(len(spans))


def test_a_trace_that_overflows_says_so_and_the_next_one_starts_afresh():
    """Catches half a timeline that looks whole, and recording that stays on."""
    assert run_distributed(2, full) == ["0", "0"]


def test_chrome_json_has_a_process_a_rank_and_a_thread_a_lane():
    """Catches lanes that two ranks share, times in another unit, and a file that does not parse."""
    spans = [
        Span(0, "compute", "product", 1_000, 3_000, "gemm_all_reduce", 7, 2, 1, variant="fused"),
        Span(1, "wait", "wait", 2_000, 2_500, "gemm_all_reduce", 7, 1, 0, variant="fused"),
        Span(1, "compute", "aten::linear", 9_000, 9_500, "aten::linear", variant="gloo"),
    ]
    report = Report("gemm", commit="abc", timeline={"case": "one", "spans": [asdict(span) for span in spans]})
    content = json.loads(text_of([report]))
    assert content["otherData"]["commit"] == "abc"
    assert content["otherData"]["cases"] == {"gemm": "one"}
    assert spans_of(content) == spans
    assert {s.variant for s in spans_of(json.loads(text_of([report, Report("model")])))} == {
        "gemm: fused",
        "gemm: gloo",
    }
    events = [e for e in content["traceEvents"] if e["ph"] == "X"]
    assert [(e["ts"], e["dur"]) for e in events] == [(0.0, 2.0), (1.0, 0.5), (8.0, 0.5)]
    assert len({(e["pid"], e["tid"]) for e in events}) == 3
    assert events[0]["args"] == {"op": "gemm_all_reduce", "epoch": 7, "part": 2, "peer": 1}
    named = {e["args"]["name"] for e in content["traceEvents"] if e["name"] == "process_name"}
    assert {"fused: rank 0", "fused: rank 1", "gloo: rank 1"} <= named
    assert all(e["tid"] == LANES.index(e["cat"]) for e in events)
    assert json.loads(text_of([Report("model")]))["traceEvents"] == []


def test_overlapping_spans_of_a_lane_count_once():
    """Catches a lane that is busy for longer than the call took."""
    spans = [
        Span(0, "compute", "product", 0, 100),
        Span(0, "compute", "product", 50, 150),
        Span(0, "compute", "product", 60, 70),
        Span(0, "wait", "wait", 200, 300),
    ]
    assert lane_seconds(spans) == {("", 0): {"compute": pytest.approx(150e-9), "wait": pytest.approx(100e-9)}}
