"""`interlace doctor` and the command line: right limits, plain problems, no work before it is asked for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from interlace.cli import COMMANDS, main
from interlace.doctor.command import problems, report
from interlace.doctor.limits import cpu_quota, memory_limit
from interlace.doctor.native import ranges


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_tightest_memory_limit_above_the_process_counts(tmp_path):
    """A pod's limit lies above its container's; reading the leaf alone promises memory that is not there."""
    root, membership = tmp_path / "cgroup", tmp_path / "self"
    write(membership, "0::/pod/container\n")
    write(root / "pod/container/memory.max", "max\n")
    write(root / "pod/memory.max", "1000000\n")
    write(root / "pod/memory.current", "300000\n")
    write(root / "memory.max", "5000000\n")
    assert memory_limit(root, membership) == (1000000, 300000)


def test_a_version_1_limit_is_read_and_its_no_limit_is_none(tmp_path):
    """Version 1 writes a number near 2**63 for no limit; as a limit it would look like exabytes."""
    root, membership = tmp_path / "cgroup", tmp_path / "self"
    write(membership, "5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n")
    write(root / "memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert memory_limit(root, membership) == (None, None)
    write(root / "memory/job/memory.limit_in_bytes", "2000000\n")
    write(root / "memory/job/memory.usage_in_bytes", "5\n")
    assert memory_limit(root, membership) == (2000000, 5)


def test_no_control_group_means_no_limit(tmp_path):
    """Some containers show neither file; the doctor must not fail there."""
    assert memory_limit(tmp_path / "none", tmp_path / "absent") == (None, None)
    assert cpu_quota(tmp_path / "none", tmp_path / "absent") is None


@pytest.mark.parametrize(
    ("name", "text", "quota"), [("cpu.max", "150000 100000\n", 1.5), ("cpu.max", "max 100000\n", None)]
)
def test_the_quota_of_version_2_is_in_cores(tmp_path, name, text, quota):
    """Two ranks under a quota of one core look like two cores to the affinity mask."""
    write(tmp_path / "self", "0::/job\n")
    write(tmp_path / "cgroup/job" / name, text)
    assert cpu_quota(tmp_path / "cgroup", tmp_path / "self") == quota


def test_the_quota_of_version_1_is_in_cores(tmp_path):
    """-1 there means no quota, and the controllers' folder may carry both names."""
    write(tmp_path / "self", "5:cpu,cpuacct:/job\n")
    folder = tmp_path / "cgroup/cpu,cpuacct/job"
    write(folder / "cpu.cfs_period_us", "100000\n")
    write(folder / "cpu.cfs_quota_us", "-1\n")
    assert cpu_quota(tmp_path / "cgroup", tmp_path / "self") is None
    write(folder / "cpu.cfs_quota_us", "50000\n")
    assert cpu_quota(tmp_path / "cgroup", tmp_path / "self") == 0.5


def test_the_json_report_needs_no_process_group():
    """A user asks the doctor before anything works."""
    result = CliRunner().invoke(main, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert {"versions", "build", "cores", "memory", "system_calls", "gpus", "native", "problems"} <= set(
        found
    )
    assert found["versions"]["torch"]
    assert found["memory"]["available"] > 0


def test_the_printed_report_names_every_section():
    """The table a person reads must hold what the JSON holds."""
    result = CliRunner().invoke(main, ["doctor"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    for words in ("torch", "affinity", "memfd create", "GPUs", "tile engine", "gemm_all_reduce", "one_shot"):
        assert words in result.output


def test_each_problem_is_told():
    """A report that always says "no problems found" would pass every test above."""
    found = report()
    found["native"]["error"] = "libinterlace_runtime.so: cannot open shared object file"
    found["cores"]["affinity"] = [3]
    found["cores"]["quota"] = 1.5
    found["system_calls"]["memfd_create"] = "Function not implemented"
    found["gpus"]["devices"] = [{"name": "a GPU"}]
    found["build"]["cuda"] = "no nvcc found when the package was built"
    told = "\n".join(problems(found))
    for words in (
        "cannot open shared object",
        "one core",
        "1.5 cores",
        "memfd_create does not work",
        "no nvcc",
    ):
        assert words in told


def test_the_bounds_of_a_range_of_rows_are_exact():
    """A table that says 128 where the switch is at 65 sends users to measure the wrong path."""

    def choose(rows: int) -> tuple[str, str]:
        if rows == 1:
            return "dot", ""
        return ("one_shot", "few") if rows <= 64 else ("owner_computes", "many")

    assert [(size, choice[0]) for size, choice in ranges(choose)] == [
        ("M 1", "dot"),
        ("M 2..64", "one_shot"),
        ("M >= 65", "owner_computes"),
    ]
    assert [size for size, _ in ranges(lambda rows: ("always", ""))] == ["M >= 1"]


def test_the_table_says_what_the_dispatcher_chooses():
    """The doctor must ask the function the ops ask; a copy of the rules would drift from them."""
    paths = report()["native"]["paths"]
    assert {row["op"] for row in paths} == {"all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce"}
    assert {row["device"] for row in paths} == {"cpu", "cuda"}
    on_gpus = [row for row in paths if row["device"] == "cuda" and row["dtype"] == "bfloat16"]
    assert {"one_shot", "fused"} <= {row["algorithm"] for row in on_gpus} or torch.cuda.is_available()
    paths = [row for row in paths if row["device"] == "cpu"]
    assert {row["dtype"] for row in paths} == {"float32", "bfloat16", "float16", "float64"}
    for row in paths:
        rows = int(row["size"].split()[-1].split("..")[-1])
        assert torch.ops.interlace.choose(row["op"], row["dtype"], rows) == (row["algorithm"], row["reason"])
        assert row["reason"]


@pytest.mark.parametrize("damage", ["missing", "unreadable"])
def test_a_broken_native_part_is_a_finding_and_not_a_crash(tmp_path, damage):
    """Who needs the doctor most is the one whose build failed: it must run on Python files alone."""
    import interlace

    package = tmp_path / "interlace"
    shutil.copytree(
        Path(interlace.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__", "*.so")
    )
    if damage == "unreadable":
        for library in Path(interlace.__file__).parent.glob("*.so"):
            (package / library.name).write_bytes(b"not a library")
    shutil.copy(Path(interlace.__file__).parents[1] / "interlace_command.py", tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", "import interlace_command; interlace_command.main()", "doctor", "--json"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["build"]["folder"] == str(package)
    assert found["native"]["error"]
    assert any("the native part cannot be loaded" in line for line in found["problems"])


def test_help_imports_no_subcommand():
    """Importing the demo for --help would make a broken extra break every command."""
    code = (
        "import sys; from click.testing import CliRunner; from interlace.cli import main;"
        "result = CliRunner().invoke(main, ['--help']); assert result.exit_code == 0, result.output;"
        "print(result.output); print([m for m in sys.modules if m.startswith(('interlace.demo', 'rich'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.rstrip().endswith("[]")
    for command in COMMANDS:
        assert command in done.stdout


def test_version_is_the_installed_one():
    """Two places that state the version drift apart."""
    import interlace

    result = CliRunner().invoke(main, ["version"])
    assert result.output == f"interlace {interlace.__version__}\n"
