"""The report as a page and as a picture: whole, self-contained, true to its rows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from interlace.bench.command import bench
from interlace.bench.drawing import linear, logarithmic, number, timeline
from interlace.bench.figures import (
    Roofline,
    bandwidth_curves,
    exposed_bars,
    roofline,
    scaling_curves,
    short_name,
)
from interlace.bench.html import page
from interlace.bench.plot import png
from interlace.bench.row import Report, Row
from interlace.bench.trace import Span, text_of

GEMM = Row(
    op="gemm_all_reduce", case="cpu", m=128, n=1024, k=512, world_size=2, dtype="bfloat16", baseline="torch + gloo",
    baseline_us=300.0, baseline_p20_us=290.0, fused_us=120.0, compute_us=100.0, collective_us=60.0, exposed_us=20.0,
    overlap_efficiency=2 / 3, speedup=290 / 120, tflops=1.12, extra={"linear_us": 110.0},
)  # fmt: skip
MACHINE = {
    "cpu": "A <CPU> & more",
    "cores": 2,
    "roof": {"peak_tflops": {"bfloat16": 2.0}, "memory_gb_s": 20.0},
}


def collective(size: int, us: float) -> Row:
    return Row(op="all_reduce", bytes=size, world_size=2, fused_us=us, busbw_gbps=size / us / 1e3, baseline="gloo",
               baseline_us=4 * us, peers_us={"mpi": 2 * us})  # fmt: skip


def scaled(ranks: int, us: float, mode: str = "strong") -> Row:
    extra = {"mode": mode, "speedup_over_one": 100.0 / us, "fit_speedup": 90.0 / us, "planner_speedup": None}
    return Row(
        op="model",
        case=f"{mode} 2 layers",
        world_size=ranks,
        fused_us=us,
        oversubscribed=ranks > 2,
        extra=extra,
    )


def reports() -> list[Report]:
    wrong = Row(op="gemm_all_reduce", m=1, n=8, k=8, correct=False, wrong=3, fused_us=5.0, compute_us=9.0)
    skipped = Row(op="gemm_all_reduce", case="<huge>", m=1, n=9, k=9, skipped="not enough memory: 40 GiB")
    spans = [Span(0, "compute", "product", 0, 4_000, variant="interlace"), Span(1, "wait", "wait", 0, 9_000)]
    entry = {"case": "one", "spans": [vars(span) for span in spans]}
    gemm = Report("gemm", "interlace bench gemm", "abc123", MACHINE, {"torch": "2.13"}, timeline=entry)
    gemm.rows = [GEMM, wrong, skipped]
    gemm.wrong, gemm.peers = (
        ["gemm_all_reduce M=1"],
        [{"name": "mpi", "version": None, "absent": "not installed"}],
    )
    plain = Report("collective", rows=[collective(1 << 10, 8.0), collective(1 << 20, 200.0)])
    return [gemm, plain, Report("scaling", rows=[scaled(1, 100.0), scaled(2, 60.0), scaled(4, 50.0)])]


class Reader(HTMLParser):
    """Tags that are opened and closed, attributes that would fetch something, text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [f"{tag} {n}={v}" for n, v in attrs if n in ("src", "href", "srcset", "data") and v]
        if tag not in ("meta", "line", "rect", "polyline", "circle", "i"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("rect", "circle", "i"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_fetches_nothing_and_closes_what_it_opens():
    """Catches a chart library from the network, a script, and a tag that swallows the rest of the page."""
    text = page(reports())
    read = Reader(text)
    assert read.open == []
    assert read.fetched == ["a href=#gemm", "a href=#collective", "a href=#scaling"]
    assert "<script" not in text
    assert "@import" not in text
    assert "url(" not in text
    assert "//" not in text
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text
    assert text.isascii()
    assert len(text) < 60_000


def test_the_page_says_where_its_numbers_are_from_and_what_is_wrong():
    """Catches numbers without machine and commit, a wrong result that looks right, names taken as markup."""
    text = page(reports())
    read = Reader(text).text
    for said in ("A <CPU> & more", "commit abc123", "torch 2.13", "interlace bench gemm", "WRONG: gemm_all_reduce M=1",
                 "skipped: not enough memory: 40 GiB", "<huge>", "oversubscribed", "mpi : not there"):  # fmt: skip
        assert said.replace("mpi :", "mpi") in re.sub(r"mpi +", "mpi ", read).replace("mpi :", "mpi"), said
    assert "120.0" in read
    assert "2.42" in read, "x baseline of GEMM"
    assert "<huge>" not in text
    with pytest.raises(ValueError, match="no reports"):
        page([])


def test_the_figures_of_a_section_are_those_of_its_right_rows():
    """Catches the upper of two middle values sold as the median, and a wrong result's speed counted as a gain."""
    rows = [replace(GEMM, overlap_efficiency=o, speedup=2.0) for o in (0.2, 0.4, 0.6, 1.9)]
    rows.append(replace(GEMM, overlap_efficiency=1.0, speedup=512.0, correct=False))
    text = page([Report("gemm", machine=MACHINE, rows=rows)])
    assert "50%" in text
    assert "2.00 x" in text
    assert "4 of 5" in text
    assert "100%<" in page([Report("gemm", machine=MACHINE, rows=rows[3:4])])


def test_bars_add_up_to_the_times_of_the_row():
    """Catches communication that is counted twice, and hidden time that exceeds compute."""
    group, wrong = exposed_bars(reports()[0])
    torch, ours = group.bars
    assert (torch.name, torch.compute, torch.exposed, torch.total) == ("torch + gloo", 110.0, 190.0, 300.0)
    assert (ours.compute, ours.exposed, ours.hidden, ours.total) == (100.0, 20.0, 40.0, 120.0)
    # faster than its own compute alone: noise, and nothing is exposed
    (bar,) = wrong.bars
    assert (bar.compute, bar.exposed, bar.hidden, wrong.note) == (5.0, 0.0, 0.0, "WRONG")
    assert short_name(GEMM) == "gemm_all_reduce, cpu, 128 x 1024 x 512, bf16"


def test_points_lie_where_operands_and_times_put_them():
    """Catches bytes of fp32 for bf16, and a roof of the wrong unit."""
    figure = roofline(reports()[0])
    flops, moved = 2 * 128 * 1024 * 512, 2 * (128 * 512 + 1024 * 512 + 128 * 1024)
    assert [(p.ours, p.tflops) for p in figure.points[:2]] == [
        (False, pytest.approx(flops / 300e-6 / 1e12)),
        (True, pytest.approx(flops / 120e-6 / 1e12)),
    ]
    assert figure.points[0].intensity == pytest.approx(flops / moved)
    # 20 GB/s x 10 FLOP/byte = 0.2 TFLOP/s; from 100 FLOP/byte on the peak of 2
    assert figure.roof("bfloat16", 10.0) == pytest.approx(0.2)
    assert figure.roof("bfloat16", 1000.0) == 2.0
    assert Roofline((), {}, None).roof("bfloat16", 1.0) is None


def test_curves_hold_every_way_and_the_ideal():
    """Catches bandwidths of peers scaled by the wrong time, and an ideal line that bends."""
    ours, gloo, mpi = bandwidth_curves(reports()[1])["all_reduce"]
    assert ours.points[1][1] == pytest.approx(4 * gloo.points[1][1]) == pytest.approx(2 * mpi.points[1][1])
    ideal, measured, fit = scaling_curves(reports()[2])["strong 2 layers, float32"]
    assert ideal.points == ((1.0, 1.0), (2.0, 2.0), (4.0, 4.0))
    assert measured.points[2] == (4.0, 2.0)
    assert fit.kind == "fit"


def test_hot_and_cold_are_told_apart_and_a_late_rank_is_no_work():
    """Catches one curve through the points of both caches, two bars of one name, a wait drawn under the roof."""
    both = [replace(collective(size, 5.0), cache=cache) for cache in ("hot", "cold") for size in (64, 128)]
    assert set(bandwidth_curves(Report("collective", rows=both))) == {"all_reduce, hot", "all_reduce, cold"}
    assert set(bandwidth_curves(Report("collective", rows=both[:2]))) == {"all_reduce"}
    rows = [GEMM, replace(GEMM, cache="cold"), replace(GEMM, straggler_us=5.0)]
    names = [group.label.rpartition(", ")[2] for group in exposed_bars(Report("gemm", rows=rows))]
    assert names == ["hot", "cold", "hot"]
    assert len(roofline(Report("gemm", rows=rows)).points) == 4


def test_axes_hold_their_values_and_few_lines():
    """Catches a point beside its picture, and an axis black with lines."""
    for values in ([1e-4, 3.0], [5.0], [0.5, 0.5], [1.0, 1e12]):
        axis = logarithmic(values, number)
        assert axis.low <= min(values) * 1.001
        assert axis.high >= max(values) * 0.999
        assert 2 <= len(axis.ticks) <= 7
    for highest in (0.03, 1.0, 7.3, 999.0):
        axis = linear(highest, number)
        assert axis.high >= highest * 0.999
        assert 3 <= len(axis.ticks) <= 7


def test_neighbours_on_a_lane_are_drawn_as_one():
    """Catches a page of megabytes for a trace of thousands of pieces."""
    spans = [Span(0, "compute", "product", i * 1000, i * 1000 + 990, variant="x") for i in range(5000)]
    drawn = timeline(spans)
    assert drawn.count("5000 x product") == 1
    assert len(drawn) < 3000


def test_a_page_is_made_of_files_that_were_written_before(tmp_path: Path):
    """Catches a timeline that gets lost or goes to another benchmark, and a file of something else."""
    made = reports()
    names = [str(tmp_path / f"{report.benchmark}.json") for report in made]
    for name, report in zip(names, made, strict=True):
        Path(name).write_text(report.to_json())
    assert "timeline" not in json.loads(Path(names[0]).read_text())
    (tmp_path / "trace.json").write_text(text_of(made))
    run, html = CliRunner(), str(tmp_path / "page.html")
    done = run.invoke(bench, ["report", *names, "--html", html, "--trace", str(tmp_path / "trace.json")])
    assert done.exit_code == 0, done.output
    assert Path(html).read_text() == page(made)
    for arguments, said in (
        ([*names, "--html", html, "--trace", names[0]], "not a file of `interlace bench ... --trace`"),
        (names, "nothing to write"),
        ([str(tmp_path / "trace.json"), "--html", html], "not a result"),
    ):
        done = run.invoke(bench, ["report", *arguments])
        assert done.exit_code == 2
        assert said in done.output


def draw() -> None:
    """What the test below runs in a process of its own."""
    assert png(reports()).startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="nothing to draw"):
        png([Report("gemm", rows=[Row(op="x", skipped="no")])])


def test_the_picture_is_a_png_and_nothing_to_draw_is_said():
    """Catches an empty picture that looks like a result. matplotlib keeps fonts open, so outside."""
    pytest.importorskip("matplotlib", reason="pip install 'interlace[bench]'")
    program = "from tests.benchmarks.test_pages import draw; draw()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
