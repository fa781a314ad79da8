"""Files of measured choices: what is read back, what is refused, which of two files wins."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from interlace.config import settings
from interlace.hardware import KNOWN
from interlace.heuristics import Entry, Launch, Table, load, merged, read, tuned, write

H200 = KNOWN["NVIDIA H200"]
ENTRY = Entry(
    "NVIDIA H200", 8, "bfloat16", "gemm_all_reduce", 1024, 8192, "fused", Launch(256), {"fused": 81.5}
)


def table(*entries: Entry) -> Table:
    return Table(load().crossovers, {e.key: e for e in entries})


def test_a_table_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    """Catches a field that is lost on the way, and a digest that depends on the order of entries."""
    other = dataclasses.replace(ENTRY, rows=2048, launch=None)
    write(tmp_path / "tuned.json", table(ENTRY, other))
    again = read(tmp_path / "tuned.json")
    assert again.entries == table(ENTRY, other).entries and again.crossovers == load().crossovers
    assert again.entries[ENTRY.key].microseconds == {"fused": 81.5}
    assert again.digest == table(other, ENTRY).digest != table(ENTRY).digest


def test_the_shipped_table_holds_for_every_gpu() -> None:
    """Catches a package without its data, and a GPU without crossovers."""
    for hardware in KNOWN.values():
        assert load().crossovers_of(hardware).one_shot_bytes == 256 * 1024


def test_the_users_file_lies_over_the_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a user's crossovers or entries that lose, and shipped ones that are forgotten."""
    slow = dataclasses.replace(load().crossovers["*"], one_shot_bytes=1)
    write(tmp_path / "mine.json", Table({"NVIDIA H200": slow}, {ENTRY.key: ENTRY}))
    monkeypatch.setattr(tuned, "settings", dataclasses.replace(settings, tuned=str(tmp_path / "mine.json")))
    both = load()
    assert both.crossovers_of(H200).one_shot_bytes == 1
    assert both.crossovers_of(KNOWN["NVIDIA L20"]).one_shot_bytes == 256 * 1024
    assert both.entries == {ENTRY.key: ENTRY}
    newer = dataclasses.replace(ENTRY, algorithm="two_shot")
    assert merged(both, table(newer)).entries[ENTRY.key].algorithm == "two_shot"


def edited(**changes: object) -> str:
    data = json.loads(table(ENTRY).to_json())
    data["entries"][0].update(changes)
    return json.dumps(data)


WRONG = (
    ("{", "not JSON"),
    ("[]", "schema 'list', expected 1"),
    ('{"schema": 2}', "schema 2, expected 1"),
    (edited(algorithm="fast"), "entry 0: algorithm='fast'; expected one of fused"),
    (edited(op="gemm"), "op='gemm'"),
    (edited(dtype="bf16"), "dtype='bf16'"),
    (edited(rows=1000), "rows=1000; buckets are powers of two"),
    (edited(world_size=0), "world_size=0"),
    (edited(speed=3), r"unknown \['speed'\]"),
    (edited(launch={"tile_columns": 128}), "launch: has .'tile_columns'., expected"),
    ('{"schema": 1, "entries": [3]}', "expected an object"),
    ('{"schema": 1, "crossovers": {"*": {}}}', r"crossovers of \*: has"),
)


@pytest.mark.parametrize(("text", "words"), WRONG, ids=[words for _, words in WRONG])
def test_files_that_do_not_fit_are_refused_with_the_place(tmp_path: Path, text: str, words: str) -> None:
    """Catches a file of another version, or a typing mistake, that quietly chooses something."""
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=words) as caught:
        read(path)
    assert "bad.json" in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none.json: No such file.*INTERLACE_TUNED"):
        read(tmp_path / "none.json")
