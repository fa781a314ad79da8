"""`interlace train`: every layout trains the same model, and its memory is what the planner says."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from interlace.planner.verify import verify
from interlace.train.command import train
from interlace.train.data import Batches
from interlace.train.session import run
from interlace.train.settings import Settings
from tests.distributed import run_distributed

SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIG: dict[str, Any] = SIZES | {
    "intermediate_size": 160,
    "vocab_size": 1000,
    "max_position_embeddings": 128,
}
COMMON = {"global_batch": 4, "seq": 48, "steps": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2},
    "dp2 ZeRO-1": {"dp": 2, "zero": 1},
    "dp2 ZeRO-2": {"dp": 2, "zero": 2},
    "dp2 ZeRO-3": {"dp": 2, "zero": 3},
    "tp2": {"tp": 2, "sequence_parallel": False},
    "tp2 SP": {"tp": 2},
    "pp2": {"pp": 2},
    "pp2 ZeRO-1": {"pp": 2, "zero": 1},
    "pp2 interleaved": {"pp": 2, "interleave": 2, "schedule": "interleaved"},
    "dp2 recomputed": {"dp": 2, "recompute": "full"},
}
SHARDED = ("dp2 ZeRO-2", "dp2 ZeRO-3")  # states only: torch's MemTracker does not know fully_shard
TRACKED = ("alone", "dp2", "dp2 ZeRO-1", "tp2", "tp2 SP", "pp2", "dp2 recomputed")


def _write(folder: Path, **changes: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **CONFIG, **changes}))
    return str(path)


def _run(rank: int, world_size: int, model: str, out: str, layout: dict[str, Any]) -> None:
    threads = torch.get_num_threads()
    run(Settings(model=model, out=out, **{**COMMON, **layout}).as_dict())
    torch.set_num_threads(threads)
    gc.collect()  # stages and sharded modules hold their groups in cycles


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """run.json of every layout on two ranks, and of one rank alone."""
    folder = tmp_path_factory.mktemp("runs")
    model = _write(folder)
    for name, layout in {"alone": {}, **LAYOUTS}.items():
        run_distributed(1 if name == "alone" else 2, _run, model, str(folder / f"{name}.json"), layout)
    return {
        path.stem: json.loads(path.read_text()) for path in folder.glob("*.json") if path.stem != "config"
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_are_those_of_one_rank(runs: dict[str, dict[str, Any]], name: str) -> None:
    """A gradient summed twice, averaged once too often or not shared shows in the second loss at the latest."""
    alone, split = runs["alone"]["losses"], runs[name]["losses"]
    assert len(set(alone)) == COMMON["steps"]  # the model moves
    assert split == pytest.approx(alone, rel=2e-5)


@pytest.mark.parametrize("name", (*TRACKED, *SHARDED))
def test_memory_is_what_the_planner_says(runs: dict[str, dict[str, Any]], name: str) -> None:
    """Every large category of every stage within 5 % of torch's MemTracker, the peak as well."""
    rows = verify(runs[name])
    assert {row.stage for row in rows} == set(range(runs[name]["settings"]["pp"]))
    large = [row for row in rows if row.large]
    states = {"parameters", "gradients", "optimizer"}
    assert {row.name for row in large} == states | (set() if name in SHARDED else {"activations", "peak"})
    wrong = [f"{row.name} of stage {row.stage}: {row.error:+.1%}" for row in large if abs(row.error) > 0.05]
    assert not wrong, ", ".join(wrong)


def test_the_record_says_what_ran(runs: dict[str, dict[str, Any]]) -> None:
    """Layout, machine, versions, losses, times and memory, for whoever reads run.json later."""
    content = runs["tp2"]
    assert content["settings"]["tp"] == 2 and content["settings"]["microbatches"] == 4
    assert {"cpu", "torch", "interlace", "commit"} <= set(content["machine"])
    assert content["step_seconds"] == pytest.approx(content["step_seconds_all"][0])
    assert content["tokens_per_second"] == pytest.approx(4 * 48 / content["step_seconds"])
    assert [rank["stage"] for rank in runs["pp2"]["memory"]] == [0, 1]


def test_replicas_share_a_batch_without_overlap(tmp_path: Path) -> None:
    """Rows of all replicas, in order, are the whole batch; labels are the next tokens; text is its bytes."""
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)))
    for path in ("", str(text)):
        batches = Batches(batch=6, seq=5, vocab=300, text=path)
        whole, labels = batches.of(3, 0, 1)
        parts = [batches.of(3, replica, 3)[0] for replica in range(3)]
        assert torch.equal(torch.cat(parts), whole)
        assert torch.equal(whole[:, 1:], labels[:, :-1])
    assert torch.equal(labels, whole + 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cp", "2"], "cp=2"),
        (["--ep", "2"], "ep=2"),
        (["--dp", "0"], "dp=0"),
        (["--zero", "4"], "zero=4"),
        (["--dtype", "fp8"], "dtype='fp8'"),
        (["--recompute", "selective"], "recompute='selective'"),
        (["--schedule", "zigzag"], "schedule='zigzag'"),
        (["--interleave", "2"], "interleave=2"),
        (["--dp", "3", "--global-batch", "4"], "no multiple"),
        (["--pp", "2", "--zero", "3"], "zero=3 with pp=2"),
        (["--global-batch", "8", "--microbatches", "3"], "8 microbatches"),
        (["--model", "no-such-model"], "not there"),
    ],
)
def test_a_wrong_option_is_named_before_anything_starts(
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    """Exit code 2 and one line."""
    result = CliRunner().invoke(train, ["--model", _write(tmp_path), *arguments])
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


def test_the_command_starts_its_own_ranks(tmp_path: Path) -> None:
    """The way a user runs it: processes, steps, run.json."""
    out = tmp_path / "run.json"
    options = [
        "--tp",
        "2",
        "--steps",
        "2",
        "--seq",
        "16",
        "--global-batch",
        "2",
        "--no-track",
        "--out",
        str(out),
    ]
    result = CliRunner().invoke(train, ["--model", _write(tmp_path), *options])
    assert result.exit_code == 0, result.output
    assert json.loads(out.read_text())["settings"]["world_size"] == 2
