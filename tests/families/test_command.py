"""`interlace families` as a command: table, JSON, page, exit status, mistakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from interlace.families import command
from interlace.families.check import Row
from interlace.families.table import page

pytest.importorskip("transformers")
GOOD = Row("llama", "Llama", "LlamaForCausalLM", "2", 3e-7, 8e-7, True, True, "structure", 14, 14, 0.83)
BAD = Row("gpt2", "GPT-2", "GPT2LMHeadModel", "2", 3e-7, 0.9, problem="gradients: relative error 9.0e-01")


def test_the_command_tries_families_and_writes_what_came_out(tmp_path: Path) -> None:
    """From the command line to processes and back: rows of ranks, JSON on standard output alone, a page."""
    written = tmp_path / "families.md"
    arguments = ["families", "--only", "llama", "--only", "bert", "--json", "-", "--write", str(written)]
    code = "from interlace_command import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ},
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [(row["family"], row["worlds"], row["passed"]) for row in rows] == [
        ("llama", "2", True),
        ("bert", "2", True),
    ]
    assert rows[0]["dynamic"] is True
    assert rows[1]["dynamic"] is None
    assert rows[0]["fused"] == rows[0]["collectives"] > 0
    text = written.read_text()
    assert "| Llama | LlamaForCausalLM | 2 |" in text
    assert "--only llama --only bert" in text
    assert "transformers 5." in text or "transformers 4." in text


def test_a_failing_family_is_exit_status_one_and_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of families that do not work must not replace one of families that do."""
    monkeypatch.setattr(command, "_rows", lambda worlds, names: [GOOD, BAD])
    written = tmp_path / "families.md"
    done = CliRunner().invoke(command.families, ["--write", str(written)])
    assert done.exit_code == 1
    assert "FAILED gpt2, 2 processes: gradients: relative error 9.0e-01" in done.output
    assert not written.exists()


def test_worlds_of_one_family_share_a_line_with_the_worst_of_each() -> None:
    """Three tables of 40 lines, or the errors of the best world, would say less than one."""
    four = Row("llama", "Llama", "LlamaForCausalLM", "4", 5e-7, 2e-7, True, True, "structure", 13, 14, 0.83)
    line = next(line for line in page([GOOD, four], "cmd").splitlines() if "LlamaForCausalLM" in line)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == [
        "Llama", "LlamaForCausalLM", "2, 4", "5.0e-07", "8.0e-07", "equal", "equal", "structure", "13/14", "83%"
    ]  # fmt: skip


@pytest.mark.parametrize("option", ["--json", "--write"])
def test_a_folder_that_is_not_there_is_told_before_the_trial(option: str, tmp_path: Path) -> None:
    """Not after all families have run."""
    done = CliRunner().invoke(command.families, [option, str(tmp_path / "no" / "file")])
    assert done.exit_code == 2
    assert "folder does not exist" in done.output


def test_a_typing_mistake_names_the_families() -> None:
    """The names are not the class names of transformers, so a wrong one must show them."""
    done = CliRunner().invoke(command.families, ["--only", "gtp2"])
    assert done.exit_code == 2
    assert "gtp2" in done.output
    assert "gpt2" in done.output
