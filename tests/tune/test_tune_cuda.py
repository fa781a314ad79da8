"""`interlace tune`: cases and candidates of GPUs that are only described, measuring with gloo on CPU tensors."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import interlace
from interlace import heuristics
from interlace.cli import main
from interlace.cuda_dispatch import GroupState, state
from interlace.hardware import KNOWN
from interlace.heuristics import Entry, Launch, Table, bucket_of, read, write
from interlace.heuristics.tuned import OPS as KNOWN_OPS
from interlace.tune.cases import Candidate, Case, candidates, cases, problem_of
from interlace.tune.command import save
from interlace.tune.measure import fastest, tuned_entry
from tests.distributed import run_distributed

H200, L20 = KNOWN["NVIDIA H200"], KNOWN["NVIDIA L20"]
CPU = torch.device("cpu")
UNFUSED = ("decomposed", "baseline")


def test_cases_are_buckets_with_a_baseline_on_cuda() -> None:
    """Catches a case whose entry no call would find, and one without anything to compare with."""
    for world_size in (2, 8):
        for case in cases(world_size, ("8b", "70b")):
            assert bucket_of(case.rows) == case.rows and bucket_of(case.width) == case.width
            assert case.op in KNOWN_OPS
            problem = problem_of(case, world_size)
            for hardware in (H200, L20, dataclasses.replace(L20, peer_access=False)):
                names = [c.name for c in candidates(problem, hardware)]
                assert names.count("baseline") == 1 and len(set(names)) == len(names)
    assert "fused/256/8" in [c.name for c in candidates(problem_of(cases(8, ("8b",))[0], 8), H200)]


def test_baseline_stays_unless_something_is_clearly_faster() -> None:
    """Catches noise that is written down as a choice."""
    baseline, fused = Candidate("baseline", Launch()), Candidate("fused", Launch())
    assert fastest({fused: 99.0, baseline: 100.0}) == baseline
    assert fastest({fused: 90.0, baseline: 100.0}) == fused


def measured(rank: int, world_size: int) -> list[tuple[str, str, dict[str, float]]]:
    """What is left without kernels of ours, timed for real: every op by the kernels of the CUDA key, on CPU tensors."""
    info = interlace.resolve(None)
    own = GroupState(dataclasses.replace(H200, name="a CPU"), "CPU tensors", heuristics.load())
    state._states[info.name] = own
    found = []
    try:
        for case in cases(world_size, ("8b",), quick=True):
            if case.rows != 16:
                continue
            small = Case(case.op, case.dtype, 8, 64, (16, 32))
            entry, times = tuned_entry(small, info, own, CPU, repeats=2, origin="here")
            assert {c.algorithm for c in times} == set(UNFUSED)
            assert all(value > 0 for value in times.values())
            found.append((entry.op, entry.algorithm, dict(entry.microseconds)))
        assert own.table.digest == heuristics.load().digest
    finally:
        state.forget(info.name)
    return found


def test_measuring_times_every_way_and_all_ranks_agree() -> None:
    """Catches ranks that write down different choices, a candidate that is not what ran, a table left changed."""
    first, second = run_distributed(2, measured)
    assert first == second
    assert len(first) == 7 and all(algorithm in UNFUSED for _, algorithm, _ in first)


ENTRY = Entry(
    "NVIDIA H200", 8, "bfloat16", "gemm_all_reduce", 1024, 8192, "fused", Launch(256), {"fused": 81.5}
)


def test_a_second_run_keeps_what_it_does_not_measure(tmp_path: Path) -> None:
    """Catches a file that is begun anew, and one of unknown content that is overwritten."""
    out = tmp_path / "tuned.json"
    other = dataclasses.replace(ENTRY, rows=2048)
    save(out, Table({}, {ENTRY.key: ENTRY}))
    save(out, Table({}, {other.key: other}))
    assert set(read(out).entries) == {ENTRY.key, other.key}
    out.write_text("{}")
    with pytest.raises(ValueError, match="schema"):
        save(out, Table({}, {}))
    assert out.read_text() == "{}"
    write(out, Table({}, {}))


def test_the_command_says_what_it_would_do_and_refuses_without_a_cuda_device() -> None:
    """Catches an import error, or silence, where there is no GPU."""
    shown = CliRunner().invoke(main, ["tune", "--dry-run", "--quick", "--models", "70b"])
    assert shown.exit_code == 0, shown.output
    assert "fused/256/16" in shown.output and "8 x NVIDIA H200" in shown.output
    bad = CliRunner().invoke(main, ["tune", "--dry-run", "--gpu", "Voodoo 2"])
    assert bad.exit_code == 2 and "NVIDIA H200" in bad.output
    if not torch.cuda.is_available():
        refused = CliRunner().invoke(main, ["tune"])
        assert refused.exit_code == 1 and "no CUDA device here" in refused.output
