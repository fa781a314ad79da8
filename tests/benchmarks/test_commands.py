"""`interlace bench`: what it prints and writes, what it does when results are wrong or the machine is too small."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from interlace.bench import launch
from interlace.bench.command import bench
from interlace.bench.journal import read_journals
from interlace.bench.row import Report, Row, read_report
from tests.benchmarks.test_ranks import SECONDS, gone

TARGET = f"{Path(__file__).with_name('small.py')}:run"
PROGRAM = "import sys; sys.argv[0] = 'interlace'; from interlace.cli import main; main()"


def settings(folder: Path, **changed: object) -> dict[str, object]:
    plain = {"benchmarks": [], "fault": None, "dtype": ["float32"], "quick": True, "journal": str(folder)}
    return {**plain, "peers": True, "cache": "hot", "tokens": 64, "heads": 2, "kv_heads": 2, **changed}


def test_every_benchmark_checks_times_and_reports(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """Catches a subcommand that stops at its first case, a row without the schema's figures, a report without the
    machine its numbers need, and peers that are passed over in silence."""
    names = ["collective", "gemm", "attention"]
    assert launch(TARGET, settings(tmp_path, benchmarks=names), 2) == 0
    reports = {report.benchmark: report for report in read_journals(tmp_path)}
    assert list(reports) == names
    assert {name: len(r.rows) for name, r in reports.items()} == {"collective": 4, "gemm": 3, "attention": 6}
    # one that is not given back leaves the next benchmark a single core
    assert len({report.machine["cores"] for report in reports.values()}) == 1
    for report in reports.values():
        assert report.wrong == []
        assert not report.partial
        assert {"cpu", "cores", "load_1min", "topology", "commit", "ranks"} <= set(report.machine)
        assert {"python", "torch", "interlace"} <= set(report.versions)
        for row in report.rows:
            assert row.correct
            assert row.baseline_us and row.fused_us and row.p20_us <= row.fused_us <= row.p95_us
            assert row.taken >= 7
        assert 0 < report.harness["largest_share"] < 0.01  # of the shortest time, the collective of 256 bytes
    _schema(reports)
    said = capfd.readouterr().out
    assert "peers: symm_mem" in said
    assert "transformer_engine (" in said


def _schema(reports: dict[str, Report]) -> None:
    gemm = reports["gemm"].rows
    assert [row.op for row in gemm] == ["all_gather_gemm", "gemm_all_reduce", "gemm_reduce_scatter"]
    for row in gemm:
        assert (row.m, row.n, row.k, row.world_size, row.dtype) == (5, 96, 64, 2, "float32")
        assert row.algorithm and row.reason
        figures = (
            row.compute_us,
            row.collective_us,
            row.exposed_us,
            row.overlap_efficiency,
            row.engine_ratio,
        )
        assert None not in (
            *figures,
            row.communication_ratio,
            row.speedup,
            row.tflops,
            row.busbw_gbps,
            row.x_floor,
        )
        assert row.tflops == pytest.approx(2 * 5 * 96 * 64 / row.fused_us / 1e6, rel=1e-4)
    assert [row.extra["count"] for row in reports["collective"].rows] == [64] * 4
    peers = {peer["name"]: peer for peer in reports["gemm"].peers}
    assert peers["symm_mem"]["version"] and peers["symm_mem"]["absent"] is None
    assert all(peer["version"] or peer["absent"] for peer in peers.values())


@pytest.mark.parametrize(
    ("names", "fault", "messages"),
    [
        (["gemm"], "no sum", ["WRONG gemm_all_reduce torch.float32 quick M=5 fused:"]),
        (
            ["gemm", "collective"],
            "one rank",
            [
                "gemm_all_reduce torch.float32 quick M=5 unfused:",
                "WRONG all_reduce torch.float32 256 bytes fused:",
            ],
        ),
    ],
)
def test_a_wrong_result_is_reported_and_is_status_one(
    tmp_path: Path, names: list[str], fault: str, messages: list[str], capfd: pytest.CaptureFixture[str]
):
    """Catches a fast and wrong kernel that a benchmark praises; also when one rank alone is wrong."""
    assert launch(TARGET, settings(tmp_path, benchmarks=names, fault=fault, peers=False), 2) == 1
    said = capfd.readouterr().out
    assert all(message in said for message in messages)
    reports = {report.benchmark: report for report in read_journals(tmp_path)}
    wrong = [row for report in reports.values() for row in report.rows if not row.correct]
    assert {row.op for row in wrong} == {
        "gemm_all_reduce",
        *(["all_reduce"] if "collective" in names else []),
    }
    if "collective" in names:  # 64 values of rank 1 are off, those of rank 0 are right
        assert [row.wrong for row in wrong if row.op == "all_reduce"] == [64]
    assert all(reports[name].wrong for name in names)


def test_the_command_writes_json_csv_and_markdown(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """Catches files that are not written by the process that started the ranks, rows with more cells than the header,
    a straggler that is not waited for."""
    files = {kind: tmp_path / "deep" / f"out.{kind}" for kind in ("json", "csv")}
    options = ["--bytes", "256,8192", "--dtype", "float32", "--quick", "--no-peers", "--straggler", "3000"]
    arguments = [
        "collective",
        "--markdown",
        *options,
        *(t for kind in files for t in (f"--{kind}", str(files[kind]))),
    ]
    done = CliRunner().invoke(bench, arguments)
    assert done.exit_code == 0, done.output
    report = read_report(files["json"])
    assert report.benchmark == "collective"
    assert len(report.rows) == 4 * 2 * 2
    late = [row for row in report.rows if row.straggler_us]
    assert len(late) == 8
    assert all(row.fused_us >= 3000 for row in late)  # the result needs the late rank
    assert {peer["absent"] for peer in report.peers} == {"not asked for"}
    lines = list(csv.DictReader(files["csv"].open()))
    assert [line["op"] for line in lines] == [row.op for row in report.rows]
    assert float(lines[0]["fused_us"]) == report.rows[0].fused_us
    table = [line for line in capfd.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 16
    assert len({line.count("|") for line in table}) == 1
    assert set(table[1]) == {"|", "-", ":"}


def test_a_case_that_does_not_fit_is_a_row_with_its_reason(capfd: pytest.CaptureFixture[str]):
    """Catches a machine that swaps or kills ranks, a call of hours that nobody asked for, and a table that is mixed
    into the JSON on standard output."""

    def rows_of(*options: str) -> list[Row]:
        arguments = [
            "gemm",
            "--shapes",
            "llama405b",
            "--dtype",
            "float32",
            "--no-peers",
            "--json",
            "-",
            *options,
        ]
        done = CliRunner().invoke(bench, arguments)
        assert done.exit_code == 0, done.output
        content = json.loads(done.stdout)
        said = capfd.readouterr()
        assert said.out == ""
        assert "all_gather_gemm" in said.err
        return Report.of(content, content.pop("rows"), "stdout").rows

    rows = rows_of("--rows", "1,32768", "--memory", "0.25")
    assert len(rows) == 10  # four products, those that sum in two ways; one row is not scattered
    assert all("not enough memory" in row.skipped and row.fused_us is None for row in rows)
    rows = rows_of("--rows", "32768", "--memory", "100000", "--longest", "1")
    assert len(rows) == 6
    assert all("a call takes about" in row.skipped for row in rows)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gemm", "--shapes", "lama"], ["'lama'", "llama1b", "llama405b", "qwen", "deepseek", "mixtral"]),
        (["gemm", "--shapes", "llama8b", "--rows", "1,x"], ["--rows 1,x", "1,16,128"]),
        (["collective", "--bytes", "big"], ["--bytes big"]),
        (["compare", "no-such.json", "b.json"], ["no-such.json"]),
        (["collective", "--json", "."], ["--json . is a folder"]),
        (["collective", "--html", f"{__file__}/page.html"], ["--html", "nothing can be written"]),
        (["gemm", "--rows", "0"], ["--rows 0", "positive"]),
        (["layer", "--shapes", "lama"], ["'lama'", "small, wide, llama1b"]),
        (["moe", "--shapes", "lama"], ["'lama'", "small, fine, llama1b"]),
        (["attention", "--heads", "3", "--kv-heads", "2"], ["--heads 3", "--kv-heads 2"]),
    ],
)
def test_a_mistake_is_one_line_before_any_rank_starts(arguments: list[str], said: list[str]):
    """Catches a traceback of every rank for a word that was typed wrong."""
    done = CliRunner().invoke(bench, arguments)
    assert done.exit_code == 2
    assert all(word in done.output for word in said)


def children(pid: int) -> list[int]:
    found = [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*found, *(grandchild for child in found for grandchild in children(child))]


def test_ctrl_c_leaves_a_partial_result_and_no_process(tmp_path: Path):
    """Catches rows that are lost with the ranks, ranks that live on, files left behind; and, on one core, rows that do
    not say that their ranks took turns."""
    out, scratch = tmp_path / "part.json", tmp_path / "scratch"
    scratch.mkdir()
    core = min(os.sched_getaffinity(0))
    before = set(os.listdir("/dev/shm"))
    command = [
        sys.executable,
        "-c",
        PROGRAM,
        "bench",
        "collective",
        "--size",
        "small",
        "--no-peers",
        "--json",
        str(out),
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "TMPDIR": str(scratch)}, preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    ) as parent:  # fmt: skip
        assert parent.stdout is not None
        try:
            said = []
            while not any(line.lstrip().startswith("all_reduce") for line in said):
                said.append(parent.stdout.readline())
                assert said[-1], "".join(said)
            family = children(parent.pid)
            parent.send_signal(signal.SIGINT)
            rest = parent.stdout.read()
            assert parent.wait(SECONDS) == 130
        finally:
            parent.kill()
    assert len(family) >= 2
    assert all(gone(pid) for pid in family)
    assert "Traceback" not in rest
    assert "collective: ended early" in rest
    report = read_report(out)
    assert report.partial
    assert report.rows and all(row.oversubscribed for row in report.rows)
    assert "oversubscribed" in "".join(said)
    assert any("2 ranks on 1 core(s)" in warning for warning in report.warnings)
    assert os.listdir(scratch) == []
    assert set(os.listdir("/dev/shm")) <= before


@pytest.mark.parametrize("script", ["gemm_collectives", "collectives"])
def test_scripts_are_the_subcommands(script: str):
    """Catches a script whose command line does not even start."""
    path = Path(__file__).parents[2] / "benchmarks" / f"{script}.py"
    done = subprocess.run([sys.executable, path, "--help"], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    for option in ("--json", "--csv", "--markdown", "--plot", "--quick", "--ranks", "--dtype"):
        assert option in done.stdout


def test_the_quick_suite_is_planned_for_less_than_a_minute():
    """Catches cases that are added to --quick until nobody runs it: what all of them may take is known before."""
    from interlace.bench import all as suite
    from interlace.bench.session import BUDGET_SECONDS

    plain: dict[str, Any] = {"dtype": ["bfloat16", "float32"], "quick": True, "cache": "cold"}
    # budget per timed row, as much again for the oracle, warming up and packing; 8 s to start and to import
    assert 8 + 2 * BUDGET_SECONDS["quick"] * len(suite.cases(plain, 2)) < 60


def test_what_cannot_run_on_so_many_ranks_is_left_out_of_all():
    """Catches a whole suite that is refused because 8 experts do not divide by 3."""
    from interlace.bench import all as suite

    plain: dict[str, Any] = {"dtype": ["float32"], "quick": True, "cache": "cold"}
    names = {type(case).__module__.rpartition(".")[2] for case in suite.cases(plain, 3)}
    assert {"collective", "gemm", "attention"} <= names
    assert "moe" not in names
    assert "moe" in {type(case).__module__.rpartition(".")[2] for case in suite.cases(plain, 2)}
