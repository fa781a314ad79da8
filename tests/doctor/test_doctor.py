"""`interlace doctor` and the command line: right limits, plain problems, no work before it is asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from interlace.cli import COMMANDS, main
from interlace.doctor.command import problems, report
from interlace.doctor.limits import cpu_quota, memory_limit


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
    for words in ("torch", "affinity", "memfd create", "GPUs", "tile engine", "paths"):
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
