"""`interlace demo` from its command line: exit status, JSON, and what it refuses."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from interlace.bench import launch
from interlace.demo.command import demo as command
from tests.demo import tiny

PATHS = ["unsplit", "gloo", "reference", "interlace"]
ROW_KEYS = {"phase", "path", "ms", "tokens_per_second", "exposed_ms", "ratio"}
PARITY_KEYS = {"max_abs_logit_diff", "greedy_equal", "perplexity_unsplit", "perplexity_split"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def split(llama: Path) -> tiny.Ran:
    """One run over two ranks with its JSON on standard output."""
    return tiny.demo("--model", str(llama), "--quick", "--json", "-")


def test_a_split_model_equals_the_unsplit_one(split: tiny.Ran):
    """Catches wrong shards of 9 query and 3 key/value heads over 2 ranks, where half a head comes easily."""
    assert split.status == 0, split.err
    parity = split.json()["parity"]
    assert parity["greedy_equal"] is True
    assert parity["max_abs_logit_diff"] < 1e-4
    assert parity["perplexity_split"] == pytest.approx(parity["perplexity_unsplit"], rel=1e-4)


def test_the_json_has_the_promised_keys_and_nothing_else_on_stdout(split: tiny.Ran):
    """Catches a progress bar or a table on standard output, and a renamed key that breaks a reader."""
    content = split.json()
    assert set(content) == {"parity", "rows", "machine"}
    assert set(content["parity"]) == PARITY_KEYS
    assert [(row["phase"], row["path"]) for row in content["rows"]] == [
        (phase, path) for phase in ("prefill", "decode") for path in PATHS
    ]
    for row in content["rows"]:
        assert set(row) == ROW_KEYS
        assert row["ms"] > 0
        assert math.isfinite(row["exposed_ms"])
    assert content["machine"]["ranks"] == 2
    assert content["machine"]["cores"] >= 1


def test_rates_and_ratios_follow_from_the_times(split: tiny.Ran):
    """Catches tokens per second of the wrong phase, and a ratio upside down."""
    for row in split.json()["rows"]:
        tokens = 128 if row["phase"] == "prefill" else 1
        assert row["tokens_per_second"] == pytest.approx(tokens / row["ms"] * 1e3)
        if row["path"] == "gloo":
            assert row["ratio"] == pytest.approx(1.0)
        if row["path"] == "unsplit":
            assert row["exposed_ms"] == 0.0


def test_a_person_reads_parity_table_and_machine(split: tiny.Ran):
    """Catches a report that speaks on every rank, or not at all."""
    assert split.err.count("perplexity:") == 1
    assert "greedy text: equal" in split.err
    for word in ("prefill", "decode", "exposed", "torch "):
        assert word in split.err


def test_bfloat16_is_judged_by_what_bfloat16_itself_loses(llama: Path, tmp_path: Path):
    """Catches an fp32 limit applied to bf16, which would fail every correct run."""
    ran = tiny.demo("--model", str(llama), "--quick", "--dtype", "bf16", "--json", str(tmp_path / "out.json"))
    assert ran.status == 0, ran.out + ran.err
    assert "bfloat16" in (tmp_path / "out.json").read_text()


@pytest.mark.parametrize("ranks", [1, 3])
def test_other_numbers_of_ranks_work(llama: Path, ranks: int):
    """Catches arithmetic that holds for two ranks only, and a world of one that waits for somebody."""
    ran = tiny.demo("--model", str(llama), "--quick", "--ranks", str(ranks), "--json", "-")
    assert ran.status == 0, ran.err
    assert ran.json()["machine"]["ranks"] == ranks


def test_an_encoder_is_compared_by_its_hidden_states(tmp_path: Path):
    """Catches a demo that asks an encoder for a next token."""
    ran = tiny.demo("--model", str(tiny.bert(tmp_path)), "--quick", "--json", "-")
    assert ran.status == 0, ran.err
    content = ran.json()
    assert content["parity"]["greedy_equal"] is None
    assert content["parity"]["max_abs_logit_diff"] < 1e-5
    assert [row["path"] for row in content["rows"]] == PATHS
    assert {row["phase"] for row in content["rows"]} == {"prefill"}
    assert "cosines" in ran.err


def test_a_broken_path_ends_with_status_one(llama: Path, capfd: pytest.CaptureFixture[str]):
    """Catches a demo that prints a difference and calls it a success: one op forgets the sum over ranks."""
    settings = {"location": str(llama), "title": "tiny", "causal": True, "dtype": "float32"}
    target = f"{Path(__file__).with_name('broken.py')}:run"
    assert launch(target, {**settings, "quick": True, "json": None}, 2) == 1
    assert "WRONG: interlace: outputs differ" in capfd.readouterr().out


def test_torchrun_brings_its_own_ranks(llama: Path, tmp_path: Path):
    """Catches a demo that starts ranks of its own under torchrun, two times two of them."""
    script = tmp_path / "run_demo.py"
    script.write_text(tiny.ENTRY)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    out = tmp_path / "out.json"
    ran = tiny.run([*torchrun, str(script), "demo", "--model", str(llama), "--quick", "--json", str(out)])
    assert ran.status == 0, ran.err
    assert '"ranks": 2' in out.read_text()
    assert ran.out.count("perplexity:") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--model", "no/such-model"],
            "--model no/such-model: neither smollm2, minilm, gemma3, antiberty, a folder",
        ),
        (["--ranks", "0"], "--ranks"),
        (["--json", "no/such/folder/out.json"], "its folder does not exist"),
        (["--dtype", "int8"], "--dtype"),
    ],
)
def test_a_mistake_is_one_line_and_no_traceback(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
):
    """Catches a mistake that is found after minutes of work, or shown as a traceback."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ran = tiny.demo(*arguments)
    assert ran.status != 0
    assert message in ran.err
    assert "Traceback" not in ran.err


def test_missing_extras_are_named_with_the_command_that_installs_them(monkeypatch: pytest.MonkeyPatch):
    """Catches an ImportError from the middle of the demo."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = CliRunner().invoke(command, [])
    assert result.exit_code == 1
    assert "pip install 'interlace[demo]'" in result.output
    assert len(result.output.strip().splitlines()) == 1
