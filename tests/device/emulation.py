"""Build and run the emulator's test programs with one line of the kernels broken on purpose."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

CSRC = Path(__file__).resolve().parents[2] / "csrc"
PROGRAMS = tuple(sorted(path.stem.removeprefix("test_") for path in (CSRC / "emu").glob("test_*.cpp")))
SHARED_FOLDERS = ("core", "cuda", "emu")  # what the programs are made of
FLAGS = ("-std=c++20", "-g1", "-pthread")  # a bug may leave something unused: no warnings
TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class Mutant:
    """A bug: in `file` below csrc, `before` becomes `after`; `program` must fail, with `tsan` or without."""

    name: str
    file: str
    before: str
    after: str
    program: str = "one_shot_all_reduce"
    tsan: bool = True


@dataclass(frozen=True)
class Result:
    """How a program ended: its exit status and what it printed."""

    status: int
    output: str


def copy_with_bug(mutant: Mutant, destination: Path) -> None:
    """Copy the sources to `destination` and plant the bug. Fails when the line is not there exactly once."""
    for folder in SHARED_FOLDERS:
        shutil.copytree(CSRC / folder, destination / folder)
    path = destination / mutant.file
    text = path.read_text()
    count = text.count(mutant.before)
    assert count == 1, (
        f"mutant {mutant.name}: {mutant.file} has {count} times {mutant.before!r}; update the mutant"
    )
    path.write_text(text.replace(mutant.before, mutant.after))


def build(program: str, *, tsan: bool, sources: Path, output: Path) -> None:
    """Compile one test program from `sources` (a csrc folder). Not optimized: most of a mutant's time is its build."""
    # misaligned 16-byte accesses trap on the device, but not on x86
    sanitizer = (
        ("-fsanitize=thread",) if tsan else ("-fsanitize=alignment", "-fno-sanitize-recover=alignment")
    )
    source = sources / "emu" / f"test_{program}.cpp"
    command = ["g++", *FLAGS, *sanitizer, f"-I{sources}", str(source), "-o", str(output)]
    compiled = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    assert compiled.returncode == 0, compiled.stderr


def _launcher() -> list[str]:
    """What to put before a program so that ThreadSanitizer finds its addresses free, where the kernel shuffles them.

    With vm.mmap_rnd_bits above 28 the library of older compilers stops with "unexpected memory mapping".
    """
    bits = Path("/proc/sys/vm/mmap_rnd_bits")
    setarch = shutil.which("setarch")
    try:
        shuffled = int(bits.read_text()) > 28
    except (OSError, ValueError):
        return []
    if not shuffled or setarch is None:
        return []
    allowed = subprocess.run([setarch, "-R", "true"], capture_output=True, check=False).returncode == 0
    return [setarch, "-R"] if allowed else []


def run(program: Path, seeds: int) -> Result:
    """Run a test program with that many seeds; ThreadSanitizer's first report ends it."""
    finished = subprocess.run(
        [*_launcher(), str(program), str(seeds)],
        env={"TSAN_OPTIONS": "halt_on_error=1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    return Result(finished.returncode, finished.stdout + finished.stderr)


def run_with_bug(mutant: Mutant, folder: Path, seeds: int) -> Result:
    """Plant the bug in a copy of the sources below `folder`, build the mutant's program there and run it."""
    copy_with_bug(mutant, folder / "csrc")
    program = folder / mutant.program
    build(mutant.program, tsan=mutant.tsan, sources=folder / "csrc", output=program)
    return run(program, seeds)


def require_caught(end: Result) -> None:
    """Fail unless a check, a race or a misaligned access ended the program."""
    assert end.status != 0, f"bug not noticed:\n{end.output}"
    reports = ("FAILED", "ThreadSanitizer: data race", "misaligned address")
    assert any(report in end.output for report in reports), end.output
