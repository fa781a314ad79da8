"""The parts of `make test-gpu` as tests, for those who have a GPU under pytest; timings are left to the command."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.device.gpu import suite


def _reason_to_skip() -> str | None:
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    import interlace  # loads the op libraries

    assert interlace is not None
    if not hasattr(torch.ops.interlace, "_device_barrier"):
        return "needs interlace_cuda.so: build with nvcc and a CUDA torch"
    return None


SKIP = _reason_to_skip()
PARTS = [part for part in suite.LIMITS if not part.startswith("timings")]


@pytest.mark.gpu
@pytest.mark.skipif(SKIP is not None, reason=f"cuda: {SKIP}")
@pytest.mark.parametrize("part", PARTS)
def test_a_part_passes_on_this_gpu(part: str, tmp_path: Path) -> None:
    """Would catch: what only hardware shows: descriptors, memory orders, graph replay, links."""
    result = suite.start(part, tmp_path)
    if result["state"] == "skipped":
        pytest.skip(f"cuda: {result['reason']}")
    assert result["state"] == "passed", result


def test_the_parts_fit_into_eight_minutes() -> None:
    """Would catch: a part whose limit makes the whole run longer than promised."""
    assert sum(suite.LIMITS.values()) <= 480


def test_a_part_that_passed_is_not_run_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Would catch: an interrupted run that starts from nothing, or results of another machine taken for this one's."""
    here = {"gpu": "one"}
    started: list[str] = []

    def start(part: str, folder: Path) -> suite.Result:
        started.append(part)
        failed = part == "protocol" and started.count(part) == 1
        return {"state": "failed" if failed else "passed", "text": "why"}

    monkeypatch.setattr(suite, "machine", lambda: here)
    monkeypatch.setattr(suite, "commit", lambda: "abc")
    monkeypatch.setattr(suite, "start", start)
    path = tmp_path / "gpu.json"
    assert suite.run(["calibration", "protocol"], path, again=False) == 1
    assert suite.run(["calibration", "protocol"], path, again=False) == 0
    assert started == ["calibration", "protocol", "protocol"]
    here["gpu"] = "another"
    suite.run(["calibration"], path, again=False)
    monkeypatch.setattr(suite, "commit", lambda: "abc-dirty")
    suite.run(["calibration"], path, again=False)
    suite.run(["calibration"], path, again=False)
    assert started[3:] == ["calibration"] * 3


def test_a_part_that_hangs_or_crashes_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Would catch: a crash that counts as passed because nothing was reported."""
    monkeypatch.setitem(suite.LIMITS, "protocol", 1)
    for code, words in (("import os; os.abort()", ""), ("import time; time.sleep(60)", "ran past 1 s")):
        monkeypatch.setattr(suite, "command", lambda part, output, c=code: [suite.sys.executable, "-c", c])
        result = suite.start("protocol", tmp_path)
        assert result["state"] == "failed" and words in result["text"]
