"""Check the signal protocol exhaustively: every interleaving of a few ranks and calls, by spin.

    python csrc/models/check.py            all clean models, then all mutants
    python csrc/models/check.py NAME ...   some of them; --list prints the names

A clean model must end without error, a mutant (one rule of the protocol broken) with a counterexample. Needs
spin and gcc. Exit status 1 when a run did not end as it must.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

MODELS = Path(__file__).resolve().parent
MEMORY_MEBIBYTES = 4096  # the largest run needs 1.6 GiB
DEPTH_LIMIT = 100_000  # steps; the longest path of any model has about 1,000
TIMEOUT_SECONDS = 600

ASSERTION = "assertion violated"
DEADLOCK = "invalid end state"


@dataclass(frozen=True)
class Run:
    """One search: a model, its settings, and the error it must find (None: it must find none)."""

    name: str
    model: str
    defines: tuple[str, ...]
    expected: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What a search found: the first error (None for a complete search without one) and its size."""

    error: str | None
    states: int
    seconds: float


CLEAN = (
    Run("one-shot-2", "one_shot.pml", ("W=2", "EPOCHS=4", "FAULTS=2")),
    Run("one-shot-2-chunks", "one_shot.pml", ("W=2", "EPOCHS=5", "CHUNKS=2", "FAULTS=2")),
    Run("one-shot-2-meet", "one_shot.pml", ("W=2", "EPOCHS=4", "FAULTS=2", "MEET")),
    Run("one-shot-3", "one_shot.pml", ("W=3", "EPOCHS=4", "FAULTS=1")),
    Run("one-shot-3-meet", "one_shot.pml", ("W=3", "EPOCHS=4", "FAULTS=1", "MEET")),
    Run("one-shot-3-two-faults", "one_shot.pml", ("W=3", "EPOCHS=2", "FAULTS=2")),
    Run("one-shot-4", "one_shot.pml", ("W=4", "EPOCHS=2", "FAULTS=1")),
    Run("owner-computes-2", "owner_computes.pml", ("W=2", "EPOCHS=4", "FAULTS=2")),
    Run("owner-computes-3", "owner_computes.pml", ("W=3", "EPOCHS=3", "FAULTS=1")),
    Run("device-2", "device.pml", ("W=2", "EPOCHS=8", "DEADLINES=2")),
    Run("device-3", "device.pml", ("W=3", "EPOCHS=5", "DEADLINES=2")),
    Run("device-4", "device.pml", ("W=4", "EPOCHS=2", "DEADLINES=1")),
    Run("tiles-2", "tiles.pml", ("W=2", "EPOCHS=2", "BLOCKS=2")),
    Run("tiles-2-empty-owner", "tiles.pml", ("W=2", "EPOCHS=4", "BLOCKS=1", "EMPTY_OWNER")),
    Run("tiles-2-broadcast", "tiles.pml", ("W=2", "EPOCHS=4", "BLOCKS=1", "BROADCAST")),
    Run("tiles-3", "tiles.pml", ("W=3", "EPOCHS=2", "BLOCKS=1")),
)

# rule broken -> the error it leads to
BROKEN_RULES = {
    "SINGLE_BUFFER": ASSERTION,
    "NO_ENTRY_WAIT": ASSERTION,
    "REFUSAL_SKIPS_WAIT": ASSERTION,
    "VALUE_BEFORE_DATA": ASSERTION,
    "ABANDONED_AFTER_VALUE": ASSERTION,
    "ONE_ABANDONED_WORD": ASSERTION,
    "FINGERPRINT_AT_ENTRY": ASSERTION,
    "SILENT_FAILURE": DEADLOCK,
}

# the second op shares the rules; two mutants show that its own channels obey them
MUTATED = {"one-shot": tuple(BROKEN_RULES), "owner-computes": ("SINGLE_BUFFER", "ABANDONED_AFTER_VALUE")}

# the same for the protocol of the device kernels, which has rules of its own
BROKEN_DEVICE_RULES = {
    "SINGLE_BUFFER": ASSERTION,
    "SIGNAL_BEFORE_STAGING": ASSERTION,
    "STAGES_AFTER_ABORT": ASSERTION,
    "PEERS_NOT_TOLD": DEADLOCK,
}

# and for their tiles: what else the search needs, and the error
BROKEN_TILE_RULES = {
    "SINGLE_BUFFER": (("BLOCKS=1",), ASSERTION),
    "SIGNAL_BEFORE_STORE": (("BLOCKS=1",), ASSERTION),
    "REDUCES_BEFORE_ALL": (("BLOCKS=1",), ASSERTION),
    "STORES_AFTER_ABORT": (("BLOCKS=1",), ASSERTION),
    "PEERS_NOT_TOLD": (("BLOCKS=1",), DEADLOCK),
    "SUM_SIGNALLED_EARLY": (("BLOCKS=1", "BROADCAST"), ASSERTION),
    "NOT_HEARD_FROM_ALL": (("BLOCKS=1", "EMPTY_OWNER"), ASSERTION),
    "FIRST_TILE_SIGNALS": (("BLOCKS=2",), ASSERTION),
    "CLAIM_IN_TWO_STEPS": (("BLOCKS=2",), ASSERTION),
}


def _mutant(model: str, rule: str, error: str, defines: tuple[str, ...] = ()) -> Run:
    name = f"{model}-mutant-{rule.lower().replace('_', '-')}"
    return Run(name, f"{model.replace('-', '_')}.pml", ("W=2", "EPOCHS=4", *defines, f"MUTANT_{rule}"), error)


MUTANTS = (
    *(_mutant(model, rule, BROKEN_RULES[rule]) for model, rules in MUTATED.items() for rule in rules),
    *(_mutant("device", rule, error) for rule, error in BROKEN_DEVICE_RULES.items()),
    *(_mutant("tiles", rule, error, more) for rule, (more, error) in BROKEN_TILE_RULES.items()),
)


def missing_tool() -> str | None:
    """Name of the program that is needed and not installed, or None."""
    return next((tool for tool in ("spin", "gcc") if shutil.which(tool) is None), None)


def search(run: Run) -> Outcome:
    """Search one model to the end. Raises RuntimeError if spin fails or the search was cut short."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="interlace-model-") as scratch:
        for source in MODELS.glob("*.pml"):
            shutil.copy(source, scratch)
        _execute(["spin", *(f"-D{define}" for define in run.defines), "-a", run.model], scratch)
        options = ["-O2", "-DSAFETY", "-DCOLLAPSE", f"-DMEMLIM={MEMORY_MEBIBYTES}"]
        _execute(["gcc", *options, "-o", "pan", "pan.c"], scratch)
        report = _execute(["./pan", f"-m{DEPTH_LIMIT}"], scratch)
    states = re.search(r"([\d.e+]+) states, stored", report)
    errors = re.search(r"errors: (\d+)", report)
    if states is None or errors is None or "depth too small" in report or "out of memory" in report:
        raise RuntimeError(f"model {run.name}: the search did not end:\n{report}")
    error = None
    if int(errors.group(1)) > 0:
        error = next((kind for kind in (ASSERTION, DEADLOCK) if f"{kind} " in report), report)
    return Outcome(error, int(float(states.group(1))), time.monotonic() - started)


def _execute(command: list[str], folder: str) -> str:
    """Run a program in `folder` and return what it printed; RuntimeError with that text when it fails."""
    process = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )
    text = process.stdout + process.stderr
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed with status {process.returncode}:\n{text}")
    return text


def main() -> int:
    """Command line: run the named searches (default all), one line each."""
    runs = {run.name: run for run in CLEAN + MUTANTS}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="searches to run (default: all)")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(runs))
        return 0
    unknown = [name for name in arguments.names if name not in runs]
    if unknown:
        parser.error(f"unknown search {unknown[0]!r}; --list prints the names")
    if (tool := missing_tool()) is not None:
        parser.error(f"{tool} is not installed; on Debian: apt-get install {tool}")

    failures = 0
    for name in arguments.names or runs:
        outcome = search(runs[name])
        good = outcome.error == runs[name].expected
        failures += not good
        verdict = "ok  " if good else "FAIL"
        found = outcome.error or "no error"
        print(
            f"{verdict} {name:46} {outcome.states:>10,} states {outcome.seconds:6.1f} s  {found}", flush=True
        )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
