"""`interlace bench compare` and the result files it reads; the README's tables are in step with the results."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from interlace.bench.command import bench
from interlace.bench.compare import compare, read_reports
from interlace.bench.output import json_text
from interlace.bench.readme import filled
from interlace.bench.row import Report, Row, read_report

ROOT = Path(__file__).parents[2]


def row(us: float, *, noise: float = 0.01, **changed: object) -> Row:
    """One row whose samples spread by `noise` standard deviations."""
    plain = Row(
        "all_reduce", bytes=4096, world_size=2, fused_us=us, p20_us=us * (1 - 0.8416 * noise), p95_us=us + 0.5
    )
    return replace(plain, **changed)  # type: ignore[arg-type]


def report(*rows: Row, **machine: object) -> Report:
    return Report("collective", machine={"cpu": "x", "torch": "2", **machine}, rows=list(rows))


def ratio_of(before: Row, after: Row) -> float:
    return compare([report(before)], [report(after)]).changes[0].ratio


def test_a_row_is_slower_beyond_the_threshold():
    """Catches the ratio upside down, and a threshold in percent taken as a share."""
    found = compare([report(row(100.0))], [report(row(110.0))])
    assert found.changes[0].ratio == pytest.approx(1.1)
    assert found.failed(0.05)
    assert not found.failed(0.15)
    assert not compare([report(row(100.0))], [report(row(90.0))]).failed(0.05)
    assert compare([report(row(100.0))], [report(row(90.0))]).changes[0].faster(0.05)


def test_noise_of_both_runs_widens_the_threshold():
    """Catches a regression that is nothing but a busy machine: sqrt(0.1^2 + 0.1^2) twice is 28 %."""
    noisy = compare([report(row(100.0, noise=0.1))], [report(row(120.0, noise=0.1))])
    assert noisy.changes[0].noise == pytest.approx(0.1414, abs=1e-4)
    assert not noisy.failed(0.05)
    assert compare([report(row(100.0, noise=0.1))], [report(row(130.0, noise=0.1))]).failed(0.05)


def test_rows_are_matched_by_what_they_measure():
    """Catches rows matched by their place in the file."""
    before = report(row(100.0), row(5.0, bytes=1024), row(7.0, op="all_gather"))
    after = report(row(5.0, bytes=1024), row(100.0), row(9.0, straggler_us=50.0))
    found = compare([before], [after])
    assert [change.ratio for change in found.changes] == [1.0, 1.0]
    assert found.gone == ("collective: all_gather bytes=4,096 float32 2 ranks hot",)
    assert len(found.new) == 1
    assert "straggler 50 us" in found.new[0]


def test_speedup_is_compared_the_other_way_round():
    """Catches a higher speedup reported as a regression."""
    found = compare([report(row(1.0, speedup=4.0))], [report(row(1.0, speedup=2.0))], "speedup")
    assert found.changes[0].ratio == 2.0
    assert compare([report(row(1.0))], [report(row(1.0, speedup=2.0))], "speedup").changes == ()
    with pytest.raises(ValueError, match="'luck'"):
        compare([], [], "luck")


def test_a_wrong_row_fails_and_another_machine_is_said():
    """Catches a fast and wrong result that passes, and times of two machines compared in silence."""
    found = compare([report(row(100.0))], [report(row(10.0, correct=False), cpu="y")])
    assert found.failed(0.05)
    assert any("cpu was x, is y" in text for text in found.warnings)
    skipped = compare(
        [report(row(1.0))], [report(Row("all_reduce", bytes=4096, world_size=2, skipped="too big"))]
    )
    assert not skipped.changes
    assert not skipped.failed(0.05)


def test_a_speedup_varies_with_both_of_its_times():
    """Catches a regression of the speedup that is nothing but a baseline whose ranks slept."""
    quiet, restless = (row(1.0, speedup=s, baseline_us=10.0, baseline_p20_us=6.0) for s in (4.0, 2.5))
    found = compare([report(quiet)], [report(restless)], "speedup")
    assert found.changes[0].noise > 0.6
    assert not found.failed(0.05)
    assert compare([report(quiet)], [report(restless)]).changes[0].noise < 0.02


def test_a_row_that_lost_its_number_is_named(tmp_path: Path):
    """Catches a case that is skipped from now on, or results of other cases, passing as "nothing is slower"."""
    files = [tmp_path / f"{name}.json" for name in "abc"]
    for file, found in zip(
        files, (row(100.0), row(0.0, fused_us=None, skipped="too big"), row(1.0, bytes=8)), strict=True
    ):
        file.write_text(report(found).to_json())
    lost = CliRunner().invoke(bench, ["compare", str(files[0]), str(files[1])])
    assert "not measured after: collective: all_reduce bytes=4,096" in lost.output
    assert "(too big)" in lost.output
    other = CliRunner().invoke(bench, ["compare", str(files[0]), str(files[2])])
    assert other.exit_code == 2
    assert "no measured row in common" in other.output


def test_the_command_exits_with_one_beyond_the_threshold(tmp_path: Path):
    """Catches a watch that prints SLOWER and lets the build pass."""
    before, after = tmp_path / "a.json", tmp_path / "b.json"
    before.write_text(report(row(100.0), row(8.0, op="all_gather")).to_json())
    busy = row(130.0, note="busy machine: 2 of 9 undisturbed")
    after.write_text(report(busy, row(8.0, op="all_gather")).to_json())
    assert CliRunner().invoke(bench, ["compare", str(before), str(after)]).exit_code == 0
    done = CliRunner().invoke(bench, ["compare", str(before), str(after), "--count-busy"])
    assert done.exit_code == 1
    assert "SLOWER collective: all_reduce bytes=4,096" in done.output
    assert "(after: busy machine: 2 of 9 undisturbed)" in done.output
    assert "2 rows in both: 1 slower, 0 faster, 1 the same" in done.output
    after.write_text(report(row(130.0), row(8.0, op="all_gather")).to_json())
    assert CliRunner().invoke(bench, ["compare", str(before), str(after)]).exit_code == 1
    assert CliRunner().invoke(bench, ["compare", str(before), str(after), "--threshold", "40"]).exit_code == 0
    assert CliRunner().invoke(bench, ["compare", str(before), str(before)]).exit_code == 0


def test_reports_survive_json_one_or_many(tmp_path: Path):
    """Catches a field that is written and not read, and a folder or an `all` that compare cannot read."""
    first = report(
        row(1.25, noise=0.0, extra={"count": 3}, peers_us={"mpi": 2.0}, reason="why"),
        row(2.0, noise=0.0, skipped="no"),
    )
    second = Report("gemm", rows=[row(3.0, noise=0.0)], wrong=["x"], partial=True)
    (tmp_path / "one.json").write_text(first.to_json())
    (tmp_path / "two.json").write_text(second.to_json())
    assert read_report(tmp_path / "one.json") == first
    assert read_reports(tmp_path) == [first, second]
    (tmp_path / "many").write_text(json_text([first, second]))
    assert read_reports(tmp_path / "many") == [first, second]


def test_what_is_no_result_is_refused(tmp_path: Path):
    """Catches a KeyError for the JSON of an older version, or for any other file."""
    old, other, folder = tmp_path / "old.json", tmp_path / "other", tmp_path / "folder"
    old.write_text('{"benchmark": "block", "rows": []}')
    other.write_text("| a |")
    folder.mkdir()
    for path, said in ((old, "schema None, expected 2"), (other, "not JSON"), (folder, "no \\*.json")):
        with pytest.raises(ValueError, match=said):
            read_reports(path)
    with pytest.raises(ValueError, match="JSON compliant"):
        report(row(float("nan"))).to_json()


@pytest.mark.parametrize(
    ("page", "tables"),
    [
        ("README.md", ("model", "collective")),
        ("docs/results.md", ("gemm", "layer", "moe", "scaling", "attention")),
    ],
)
def test_pages_are_in_step_with_the_results(page: str, tables: tuple[str, ...]):
    """Catches a table that was edited by hand, and results that were measured anew without `interlace bench readme`."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert tuple(re.findall("<!-- bench:(?!end)(\\w+) -->", text)) == tables
    assert filled(text, ROOT / "benchmarks" / "results") == text


def test_marks_of_a_readme_are_checked(tmp_path: Path):
    """Catches a table that is replaced up to the end of another one, and a name that is passed over."""
    (tmp_path / "gemm.json").write_text(Report("gemm", rows=[row(12.0, op="gemm_all_reduce")]).to_json())
    made = filled("a\n<!-- bench:gemm -->\nold\n<!-- bench:end -->\nb", tmp_path)
    assert made.startswith("a\n<!-- bench:gemm -->\n\n| op | dtype |")
    assert "| `gemm_all_reduce` | fp32 |" in made
    assert made.endswith("<!-- bench:end -->\nb")
    assert "old" not in made
    assert filled(made, tmp_path) == made
    for text, said in (
        ("<!-- bench:gemm -->\n", "no <!-- bench:end -->"),
        ("<!-- bench:luck -->\n<!-- bench:end -->", "bench:luck"),
        ("<!-- bench:layer -->\n<!-- bench:end -->", "layer.json is missing"),
    ):
        with pytest.raises(ValueError, match=said):
            filled(text, tmp_path)
    readme = tmp_path / "R.md"
    readme.write_text("<!-- bench:gemm -->\nold\n<!-- bench:end -->\n")
    arguments = ["readme", "--readme", str(readme), "--results", str(tmp_path)]
    assert CliRunner().invoke(bench, [*arguments, "--check"]).exit_code == 1
    assert CliRunner().invoke(bench, arguments).exit_code == 0
    assert CliRunner().invoke(bench, [*arguments, "--check"]).exit_code == 0
