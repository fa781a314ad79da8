"""`interlace plan`: the table, JSON, explanation, picture, page and its refusals, without loading torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import interlace
from interlace.planner.command import plan_command

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
TRAINING = "--cluster h100x8 --gpus 16 --seq 8192 --global-batch 64"


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def run(*words: str) -> Result:
    return CliRunner().invoke(plan_command, list(words))


def test_the_command_answers_without_torch(config: str) -> None:
    """Torch alone takes longer to import than the command may take; its import anywhere on this path shows here."""
    program = (
        "import sys\n"
        "sys.argv = ['interlace', 'plan', *sys.argv[1:]]\n"
        "import interlace_command\n"
        "try:\n    interlace_command.main()\n"
        "finally:\n    print(sorted({'torch', 'transformers', 'matplotlib'} & set(sys.modules)), file=sys.stderr)\n"
    )
    source = str(Path(interlace.__file__).parents[1])
    words = ["--model", config, *TRAINING.split(), "--json"]
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60,
        env={"PYTHONPATH": source, "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.split("\n")[-2] == "[]"
    assert json.loads(done.stdout)["model"]["parameters"] == 8_030_261_248


def test_json_holds_what_the_api_returns(config: str) -> None:
    """Same layouts, same order; bytes and seconds as numbers."""
    result = run("--model", config, *TRAINING.split(), "--json", "--top", "3", "--explain")
    assert result.exit_code == 0, result.output
    record = json.loads(result.output)
    layouts = interlace.plan(CONFIG, cluster="h100x8", gpus=16, seq=8192, global_batch=64)
    assert record["layouts_that_fit"] == len(layouts)
    for mine, theirs in zip(record["layouts"], layouts[:3], strict=True):
        assert [mine[name] for name in ("dp", "tp", "pp", "cp", "ep")] == [
            theirs.dp, theirs.tp, theirs.pp, theirs.cp, theirs.ep
        ]  # fmt: skip
        assert mine["seconds"] == pytest.approx(theirs.seconds)
        assert mine["margin"] == pytest.approx(theirs.margin)
    compile(record["snippet"], "layout.py", "exec")
    assert {formula["name"] for formula in record["formulas"]} >= {
        "parameters",
        "world",
        "compute",
        "step",
        "MFU",
    }
    assert all(formula["source"] for formula in record["formulas"])


def test_the_table_names_the_best_its_margin_and_why_others_lost(config: str) -> None:
    """Columns are aligned: every row of the ranking ends where its header does."""
    result = run("--model", config, *TRAINING.split(), "--top", "4", "--explain", "--tokens", "1e12")
    assert result.exit_code == 0, result.output
    lines = result.output.split("\n")
    header = next(number for number, line in enumerate(lines) if line.startswith("#  "))
    rows = lines[header : header + 5]
    assert len({len(row.rstrip()) for row in rows}) == 1, rows
    for words in (
        "Why the others lost",
        "margin to the limit",
        "communication of a step",
        "-m interlace.train",
        "source:",
    ):
        assert words in result.output, words
    layouts = interlace.plan(CONFIG, cluster="h100x8", gpus=16, seq=8192, global_batch=64)
    assert f"The best: {layouts[0].name}" in result.output


def test_json_text_and_names_are_models_too() -> None:
    """--model takes a path, JSON text or a shipped name; the program then carries the config."""
    text = run("--model", json.dumps(CONFIG), *TRAINING.split(), "--json", "--top", "1")
    named = run("--model", "llama-3-8b", *TRAINING.split(), "--json", "--top", "1")
    records = [json.loads(result.output) for result in (text, named)]
    assert records[0]["layouts"] == records[1]["layouts"]
    assert all("AutoConfig.for_model" in record["snippet"] for record in records)
    assert "llama-3.1-70b" in run("--list").output and "h100x8" in run("--list").output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpus", "0"], "gpus=0"),
        (["--gpus", "many"], "'many' is not a valid integer"),
        (["--gpus", "12"], "do not fill whole nodes of 8"),
        (["--seq", "-5"], "seq=-5"),
        (["--global-batch", "0"], "global_batch=0"),
        (["--dtype", "bf17"], "bf17"),
        (["--zero", "7"], "--zero 7"),
        (["--schedule", "2f2b"], "2f2b"),
        (["--recompute", "some"], "some"),
        (["--cluster", "nowhere"], "nowhere"),
        (["--model", "nothing.json"], "nothing.json"),
        (["--model", "{broken"], "not JSON"),
        (["--model", '{"model_type": "unheard-of"}'], "unheard-of"),
        (["--headroom", "2"], "headroom"),
        (["--top", "0"], "--top 0"),
        (["--no-such-option"], "no-such-option"),
        (["--model", "llama-3.1-405b", "--gpus", "8"], "smallest that fits is"),
        (["--serving", "--concurrency", "0"], "concurrency=0"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(config: str, words: list[str], said: str) -> None:
    """Neither a traceback nor a page of usage, and nothing on stdout."""
    result = run("--model", config, *TRAINING.split(), *words)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert said.lower() in result.stderr.lower(), result.stderr
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("Error: ")


def test_an_inconsistent_cluster_file_names_file_and_field(tmp_path: Path, config: str) -> None:
    """A YAML file whose numbers cannot be is refused by name."""
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\ndevices_per_node: 0\ndevice: {}\nnode: {}\n")
    result = run("--model", config, *TRAINING.split(), "--cluster", str(path))
    assert result.exit_code == 2
    assert "mine.yaml" in result.stderr and "devices_per_node=0" in result.stderr


def test_a_missing_option_is_named() -> None:
    """What is needed, by its option."""
    assert "--model is missing" in run("--gpus", "8").stderr
    assert "--gpus is missing" in run("--model", "llama-3-8b").stderr
    assert "--global-batch is missing" in run("--model", "llama-3-8b", "--gpus", "8", "--seq", "8").stderr


@pytest.mark.parametrize("serving", [False, True])
def test_the_page_is_whole_and_asks_for_nothing_outside(config: str, tmp_path: Path, serving: bool) -> None:
    """Opens without a network: no address, script, import or font; tags are balanced; the numbers are there."""
    path = tmp_path / "plan.html"
    words = ["--gpus", "8", "--serving"] if serving else TRAINING.split()
    assert run("--model", config, *words, "--html", str(path)).exit_code == 0
    text = path.read_text()
    assert not re.search(r"https?://|<script|@import|url\(|<link|<img", text)
    assert 'name="viewport"' in text
    for tag in ("div", "table", "tr", "td", "span", "details", "pre", "svg", "h2", "dl"):
        assert len(re.findall(rf"<{tag}[ >]", text)) == text.count(f"</{tag}>"), tag
    assert ("<svg" in text) != serving
    assert "limit" in text and "interlace" in text


def test_the_picture_and_the_program_are_written(config: str, tmp_path: Path) -> None:
    """A PNG of some size with colours in it, and a program that compiles; matplotlib keeps fonts open, so outside."""
    pytest.importorskip("matplotlib")
    picture, program = tmp_path / "plan.png", tmp_path / "layout.py"
    words = [
        "--model",
        config,
        *TRAINING.split(),
        "--plot",
        str(picture),
        "--snippet",
        str(program),
        "--json",
    ]
    code = (
        "import sys\n"
        "sys.argv = ['interlace', 'plan', *sys.argv[1:]]\n"
        "import interlace_command\n"
        "try:\n    interlace_command.main()\n"
        "except SystemExit as done:\n    assert not done.code\n"
        "from matplotlib import image\n"
        f"pixels = image.imread({str(picture)!r})\n"
        "shown = pixels[::9, ::9, :3].reshape(-1, 3).tolist()\n"
        "print(min(pixels.shape[:2]), len({tuple(pixel) for pixel in shown}), file=sys.stderr)\n"
    )
    source = str(Path(interlace.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120,
        env={"PYTHONPATH": source, "PATH": "", "MPLCONFIGDIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    height, colours = map(int, done.stderr.split("\n")[-2].split())
    assert height > 400 and colours > 10
    compile(program.read_text(), "layout.py", "exec")
