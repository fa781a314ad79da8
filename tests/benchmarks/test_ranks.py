"""Ranks that a benchmark or the demo starts work together, fail together and never outlive their parent."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from interlace.bench import launch
from tests.benchmarks import ranks

TARGET = f"{ranks.__file__}:run"
SECONDS = 120  # on a busy machine; an idle one needs 5


def pids(folder: Path) -> list[int]:
    return [int((folder / f"pid{rank}").read_text()) for rank in range(2)]


def gone(pid: int) -> bool:
    """Waits until the process has ended; the kernel says so through its pidfd."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], SECONDS)[0])
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("target", [TARGET, "tests.benchmarks.ranks:run"])
def test_ranks_share_a_process_group(tmp_path: Path, target: str):
    """Catches ranks that each found a world of their own; the target may be a file or a module."""
    assert launch(target, {"folder": str(tmp_path), "what": "sum"}, 3) == 0
    assert [(tmp_path / f"sum{rank}").read_text() for rank in range(3)] == ["6"] * 3


def test_the_first_failure_is_the_status_and_ends_the_others(tmp_path: Path):
    """Catches a launcher that waits for rank 0 for ever while rank 1 has failed."""
    assert launch(TARGET, {"folder": str(tmp_path), "what": "fail"}, 2) == 3
    assert all(gone(pid) for pid in pids(tmp_path))


def test_a_killed_rank_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """Catches a run that the kernel ended for memory and that looks like a success, or like nothing."""
    assert launch(TARGET, {"folder": str(tmp_path), "what": "killed"}, 2) == 128 + signal.SIGKILL
    assert "rank 0 was ended by signal 9" in capfd.readouterr().err


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_no_rank_outlives_its_parent(tmp_path: Path, sent: signal.Signals, status: int):
    """Catches ranks that spin on after Ctrl-C, or after the parent was killed and could not clean up."""
    command = [sys.executable, ranks.__file__, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        try:
            assert [parent.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
            parent.send_signal(sent)
            assert parent.wait(SECONDS) == status
        finally:
            parent.kill()
        assert all(gone(pid) for pid in pids(tmp_path))
        assert "Traceback" not in parent.stderr.read()


def test_no_ranks_is_a_mistake():
    """Catches a run of nothing that ends with status 0."""
    with pytest.raises(ValueError, match="ranks=0"):
        launch(TARGET, {}, 0)
