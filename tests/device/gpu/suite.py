"""`python -m tests.device.gpu.suite`: every part in a process of its own, results in one JSON.

A part that passed on this machine and commit is not run again, so an interrupted run goes on where it stopped; a part
that hangs or crashes costs its own limit and no more.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"
# seconds a part may take; together below eight minutes with room for starting
LIMITS = {
    "calibration": 45,
    "correctness": 100,
    "protocol": 60,
    "processes": 50,
    "memcheck": 45,
    "racecheck": 45,
    "timings gemm": 45,
    "timings overhead": 20,
    "timings fused": 30,
    "timings reducer": 15,
    "timings small": 15,
}
TOOLS = ("memcheck", "racecheck")
# More hardware queues than ranks: streams that share one may wait for each other, and ranks do wait. All kernels are
# loaded before the first launch: loading one later may wait for the device, on which a rank waits for the next launch.
ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}
Result = dict[str, Any]


def machine() -> Result:
    """What the numbers depend on."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "gpus": torch.cuda.device_count(),
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
    }


def commit() -> str:
    """The commit of the sources, with -dirty when they differ from it."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def play(part: str) -> Result:
    """Run one part in this process."""
    from tests.device.gpu import calibration, correctness, processes, protocol, timings
    from tests.device.gpu.problems import Scope, small

    if part.startswith("timings "):
        return {"rows": list(timings.PARTS[part.removeprefix("timings ")]())}
    if part == "processes":
        return {"ranks": processes.main()}
    of_part: dict[str, Callable[[], Any]] = {
        "calibration": lambda: calibration.cases("cuda"),
        "correctness": lambda: correctness.cases(Scope("cuda")),
        "protocol": protocol.cases,
        # one kernel at a time under a tool: ranks that wait for each other would wait for ever
        "small": lambda: correctness.cases(small("cuda").alone()),
    }
    ran, failures = 0, []
    for case in of_part[part]():
        try:
            case.run()
            torch.cuda.synchronize()
        except Exception as error:
            failures.append(f"{case.name}: {type(error).__name__}: {error}")
        ran += 1
    return {"cases": ran, "failed": len(failures), "failures": failures[:20]}


def command(part: str, output: Path) -> list[str] | None:
    """How a part is started; None when this machine cannot."""
    inner = [sys.executable, "-m", "tests.device.gpu.suite", "--output", str(output), "--part"]
    if part not in TOOLS:
        return [*inner, part]
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        return None
    return [tool, "--tool", part, "--error-exitcode", "9", *inner, "small"]


def start(part: str, folder: Path) -> Result:
    """Run one part in a process of its own."""
    output = folder / f"{part.replace(' ', '_')}.part.json"
    output.unlink(missing_ok=True)
    arguments = command(part, output)
    if arguments is None:
        return {"state": "skipped", "reason": "compute-sanitizer is not installed"}
    begin = time.monotonic()
    try:
        done = subprocess.run(
            arguments,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=LIMITS[part],
            env={**os.environ, **ENVIRONMENT},
            check=False,
        )
        code, text = done.returncode, done.stdout[-2000:] + done.stderr[-2000:]
    except subprocess.TimeoutExpired as error:
        code, text = -1, f"ran past {LIMITS[part]} s\n{str(error.stdout or '')[-1500:]}"
    found = json.loads(output.read_text()) if output.exists() else {}
    output.unlink(missing_ok=True)
    passed = code == 0 and found.get("failed", 0) == 0 and bool(found)
    if part == "processes" and passed and found["ranks"] == 0:
        return {"state": "skipped", "reason": "one GPU; several are needed"}
    result = {
        "state": "passed" if passed else "failed",
        "seconds": round(time.monotonic() - begin, 1),
        **found,
    }
    return result if passed else {**result, "exit": code, "text": text}


def kept(path: Path, here: Result, version: str) -> dict[str, Result]:
    """Parts of an earlier run on this machine and commit that need not run again."""
    if not path.exists() or version.endswith("-dirty"):
        return {}
    before = json.loads(path.read_text())
    if before["machine"] != here or before["commit"] != version:
        return {}
    return {name: part for name, part in before["parts"].items() if part["state"] == "passed"}


def run(parts: list[str], path: Path, *, again: bool) -> int:
    """Run the parts that have not passed yet; write the JSON after each. Returns how many failed."""
    here, version = machine(), commit()
    done = {} if again else kept(path, here, version)
    path.parent.mkdir(parents=True, exist_ok=True)
    for part in parts:
        if part in done:
            print(f"{part}: passed before")
            continue
        done[part] = start(part, path.parent)
        report = {"machine": here, "commit": version, "parts": done}
        path.write_text(json.dumps(report, indent=1) + "\n")
        told = {k: v for k, v in done[part].items() if k not in ("rows", "text")}
        print(f"{part}: {json.dumps(told)}", flush=True)
        if done[part]["state"] == "failed":
            print(done[part]["text"], flush=True)
    return sum(done[part]["state"] == "failed" for part in parts)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=RESULTS, help="where results go")
    parser.add_argument("--only", nargs="*", choices=list(LIMITS), help="these parts")
    parser.add_argument("--again", action="store_true", help="also parts that passed before")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part is None:
        return min(1, run(arguments.only or list(LIMITS), arguments.json, again=arguments.again))
    import interlace  # loads the op libraries

    assert interlace is not None
    result = play(arguments.part)
    arguments.output.write_text(json.dumps(result))
    return 1 if result.get("failed", 0) else 0


if __name__ == "__main__":
    sys.exit(main())
