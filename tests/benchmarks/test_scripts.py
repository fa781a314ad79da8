"""The scripts in benchmarks/: they print what they promise, and a wrong result is WRONG and status 1."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from interlace.bench import launch

TARGET = f"{Path(__file__).with_name('small.py')}:run"
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = ["gemm_collectives", "block", "collectives"]


def settings(script: str, **changed: object) -> dict[str, object]:
    plain = {"script": script, "fault": None, "dtype": ["float32"], "seed": 0, "quick": True}
    return {**plain, "json": None, "markdown": False, "plain": False, **changed}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_benchmark_checks_times_and_writes_json(script: str, tmp_path: Path):
    """Catches a script that stops at its first shape, and a JSON without the machine its numbers need."""
    out = tmp_path / "out.json"
    assert launch(TARGET, settings(script, json=str(out)), 2) == 0
    content = json.loads(out.read_text())
    assert content["benchmark"] == script
    assert content["wrong"] == []
    assert {"cpu", "cores", "torch", "interlace", "commit", "load_1min", "topology"} <= set(
        content["machine"]
    )
    assert len(content["rows"]) == {"gemm_collectives": 3, "block": 1, "collectives": 3}[script]
    assert all(row["dtype"] == "float32" and row["taken"] >= 7 for row in content["rows"])


@pytest.mark.parametrize(
    ("script", "fault", "message"),
    [
        ("gemm_collectives", "no sum", "WRONG gemm_all_reduce torch.float32 M,K,N=(5, 64, 96) fused"),
        ("gemm_collectives", "one rank", "WRONG gemm_all_reduce torch.float32 M,K,N=(5, 64, 96) unfused"),
        ("block", "no sum", "WRONG block torch.float32 M=3 fused"),
        ("collectives", "one rank", "WRONG all_reduce torch.float32 256 bytes interlace"),
    ],
)
def test_a_wrong_result_is_reported_and_is_status_one(
    script: str, fault: str, message: str, capfd: pytest.CaptureFixture[str]
):
    """Catches a fast and wrong kernel that a benchmark praises; also when one rank alone is wrong."""
    assert launch(TARGET, settings(script, fault=fault), 2) == 1
    assert message in capfd.readouterr().out


def test_markdown_is_a_table_that_a_readme_can_hold(capfd: pytest.CaptureFixture[str]):
    """Catches rows with more or fewer cells than the header."""
    assert launch(TARGET, settings("collectives", markdown=True), 2) == 0
    table = [line for line in capfd.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 3
    assert len({line.count("|") for line in table}) == 1
    assert set(table[1]) == {"|", "-"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_says_what_the_columns_mean(script: str):
    """Catches a script whose command line does not even start."""
    done = subprocess.run(
        [sys.executable, BENCHMARKS / f"{script}.py", "--help"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for option in ("--json", "--markdown", "--quick", "--ranks", "--dtype"):
        assert option in done.stdout
