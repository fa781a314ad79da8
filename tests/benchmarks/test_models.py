"""Layers, whole models, experts and scaling: every row right before it is timed, and the arithmetic of the curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from interlace.bench import launch, layer, model, moe, scaling
from interlace.bench.decoders import SIZES
from interlace.bench.html import page
from interlace.bench.journal import read_journals
from interlace.bench.row import Report
from interlace.bench.trace import LANES, spans_of

TARGET = f"{Path(__file__).with_name('small_models.py')}:run"
NAMES = ["layer", "model", "moe", "scaling"]


def settings(folder: Path, **changed: object) -> dict[str, object]:
    plain = {"benchmarks": NAMES, "fault": None, "dtype": ["float32"], "quick": True, "journal": str(folder)}
    return {**plain, "model": ["transformer"], "planner": False, "cache": "cold", **changed}


def reports_of(folder: Path) -> dict[str, Report]:
    return {report.benchmark: report for report in read_journals(folder)}


def test_every_row_is_right_timed_and_has_its_figures(tmp_path: Path):
    """Catches a way to split that is fast because it is wrong, a phase that is left out, tokens/s of something else,
    a peer that takes no part without a word, and pages and lanes that real rows do not fill."""
    assert launch(TARGET, settings(tmp_path, html="wanted"), 2) == 0
    reports = reports_of(tmp_path)
    assert list(reports) == NAMES
    for report in reports.values():
        assert report.wrong == []
        assert not report.partial
        assert all(row.correct and row.fused_us and row.taken >= 7 and not row.skipped for row in report.rows)
        for row in report.rows:
            assert row.extra["tokens_per_second"] == pytest.approx(row.tokens / row.fused_us * 1e6, rel=1e-3)
    _blocks(reports["layer"])
    _models(reports["model"])
    _experts(reports["moe"])
    _worlds(reports["scaling"], [1, 2])
    text = page(list(reports.values()))
    assert all(f'id="{name}"' in text for name in NAMES)
    assert "Timeline: " in text
    assert "weak 2-layer train, float32" in text
    for name, read in (("layer", layer), ("model", model), ("moe", moe), ("scaling", scaling)):
        assert read.readme(reports[name]).count("\n") == 1 + len(reports[name].rows)


def _blocks(report: Report) -> None:
    found = [(row.op, row.case, row.tokens) for row in report.rows]
    assert found == [
        (part, f"small {phase}", tokens)
        for part in ("mlp", "attention")
        for phase, tokens in (("forward", 5), ("train", 7))
    ]
    for row in report.rows:
        assert row.baseline_us and row.compute_us and row.collective_us and row.extra["unsplit_us"]
        assert 0 <= row.extra["exposed_share"] <= 1
        assert row.overlap_efficiency == pytest.approx(
            1 - row.exposed_us / row.collective_us, rel=1e-3, abs=1e-3
        )
    assert report.rows[0].peer == "parallelize_module"
    spans = spans_of(report.timeline)
    assert {span.variant for span in spans} == {report.rows[0].baseline, "interlace"} or spans
    assert (
        {"compute", "publish"} <= {span.lane for span in spans if span.variant == "interlace"} <= set(LANES)
    )


def _models(report: Report) -> None:
    assert [(row.case, row.tokens) for row in report.rows] == [
        ("small prefill", 9), ("small decode", 1), ("small train", 11),
    ]  # fmt: skip
    assert {peer["name"]: peer["absent"] for peer in report.peers} == {
        "parallelize_module": None,
        "tp_plan": None,
    }
    prefill, _, train = report.rows
    assert set(prefill.peers_us) == {"parallelize_module", "tp_plan"}
    assert (train.baseline, set(train.peers_us)) == ("parallelize_module", {"tp_plan"})
    assert all(row.extra["unsplit_us"] and row.compute_us and row.collective_us for row in report.rows)


def _experts(report: Report) -> None:
    assert [row.op for row in report.rows] == ["moe experts", "moe features"]
    whole, parts = report.rows
    assert whole.baseline == "all_to_all_single"
    assert whole.extra["imbalance"] >= 1.0
    assert (whole.extra["experts"], whole.extra["top_k"], parts.extra["imbalance"]) == (4, 2, 1.0)
    # an all-reduce in a ring sends every byte of [13, 64] fp32 once, twice the half of it
    assert parts.extra["moved_mb"] == pytest.approx(13 * 64 * 4 / 1e6, rel=1e-3)


def _worlds(report: Report, counts: list[int]) -> None:
    assert [(r.extra["mode"], r.world_size) for r in report.rows] == [
        (mode, n) for mode in ("strong", "weak") for n in counts
    ]
    for row in report.rows:
        assert "unsplit model" in row.extra["denominator"]
        assert row.extra["efficiency"] == pytest.approx(
            row.extra["speedup_over_one"] / row.world_size, rel=1e-3
        )
        first = next(r for r in report.rows if r.extra["mode"] == row.extra["mode"])
        assert row.tokens == (16 if row.extra["mode"] == "strong" else 8 * row.world_size)
        grown = row.tokens / first.tokens
        assert row.extra["speedup_over_one"] == pytest.approx(first.fused_us / row.fused_us * grown, rel=1e-3)
    assert {row.extra["fitted_worlds"] for row in report.rows} == {1}


def test_more_ranks_than_cores_and_sizes_that_do_not_divide_are_right_too(tmp_path: Path):
    """Catches idle ranks that hang a smaller world, rows of an oversubscribed world that are not marked, and 2
    key/value heads over 3 ranks."""
    names = ["layer", "moe", "scaling"]
    assert launch(TARGET, settings(tmp_path, benchmarks=names, worlds="1,3"), 3) == 0
    reports = reports_of(tmp_path)
    assert all(row.correct for report in reports.values() for row in report.rows)
    cores = reports["scaling"].machine["cores"]
    assert [row.oversubscribed for row in reports["scaling"].rows] == [False, cores < 3] * 2


@pytest.mark.parametrize(
    ("benchmarks", "fault", "messages"),
    [
        (
            ["layer", "model", "scaling"],
            "weights of one rank",
            [
                "WRONG mlp of small, forward, 5 tokens, torch.float32 fused",
                "WRONG attention of small, train, 7 tokens, torch.float32 interlace grad_x",
                "WRONG small prefill, 9 tokens, float32 fused",
                "WRONG small train, 11 tokens, float32 fused gradients",
                "WRONG train float32 on 2 ranks, fused",
            ],
        ),
        (["moe"], "rows to the wrong rank", ["WRONG experts of small, 13 tokens, float32 fused"]),
    ],
)
def test_a_wrong_split_is_reported_and_is_status_one(
    benchmarks: list[str], fault: str, messages: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """Catches a benchmark that praises a split whose ranks hold the wrong weights, or whose rows went astray."""
    assert launch(TARGET, settings(tmp_path, benchmarks=benchmarks, fault=fault), 2) == 1
    said = capfd.readouterr().out
    assert all(message in said for message in messages), said
    # torch's own splits are of weights that nobody touched
    wrong = [line.split(": off")[0] for line in said.splitlines() if line.startswith("WRONG")]
    assert not any(line.endswith((" torch", "_module", "tp_plan", "baseline grad_x")) for line in wrong), (
        wrong
    )


def test_the_fit_finds_the_numbers_it_was_made_from():
    """Catches communication taken for serial work, and a fraction below zero."""

    def one(tokens: int) -> float:
        return 100.0 * tokens

    def made(ranks: int, tokens: int) -> scaling.Time:
        compute = one(tokens) * (0.2 + 0.8 / ranks)
        exposed = 3.0 * tokens * 2 * (ranks - 1) / ranks
        return scaling.Time(ranks, tokens, compute + exposed, compute, exposed)

    found = scaling.fit(one, [made(1, 10), made(2, 10), made(4, 10), made(8, 80)])
    assert found is not None
    assert (found.serial, found.communication, found.points) == (pytest.approx(0.2), pytest.approx(3.0), 3)
    assert found.total(one(10), 4, 10) == pytest.approx(made(4, 10).total)
    assert found.total(one(10), 1, 10) == pytest.approx(one(10))
    assert scaling.fit(one, [made(1, 10)]) is None
    faster = scaling.fit(one, [scaling.Time(2, 10, 300.0, 400.0, -100.0)])
    assert faster is not None
    assert (faster.serial, faster.communication) == (0.0, 0.0)


def test_speed_ups_of_both_kinds_of_scaling():
    """Catches weak scaling whose grown work does not count."""
    assert scaling.speedup("strong", 4, 100.0, 50.0) == 2.0
    assert scaling.speedup("weak", 4, 100.0, 125.0) == pytest.approx(3.2)


def test_sizes_and_operations_of_a_layer_are_counted_right():
    """Catches a factor of two in TFLOP/s: 2 operations a weight and token, three products of a gated MLP."""
    plain = {"dtype": ["bfloat16"], "size": "small", "shapes": ("llama8b",), "rows": "16"}
    found = {(case.part, case.train): case for case in layer.cases(plain, 2)}
    mlp = found["mlp", False]
    assert mlp.flops == 2 * 16 * 3 * 4096 * 14336 // 2
    assert found["mlp", True].flops == 3 * mlp.flops
    products = 2 * 16 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
    assert found["attention", False].flops == (products + 2 * 16 * 16 * 4096) // 2
    assert mlp.memory_bytes > 2 * 3 * 4096 * 14336
    assert SIZES["small"].attention_parameters == 2 * 1024 * (1024 + 256)
    # half of the rows are the peer's in the mean, and come back
    case = moe.cases({"dtype": ["float32"], "quick": True, "shapes": ("mixtral",), "tokens": 8}, 2)[0]
    assert case.flops == 2 * 8 * 2 * 3 * 4096 * 14336 // 2


@pytest.mark.parametrize(
    ("module", "wrong", "said"),
    [
        (layer, {"shapes": ("llama9b",)}, "no set of shapes 'llama9b'"),
        (layer, {"shapes": ("deepseek",)}, "layers of another kind"),
        (model, {"model": ("gpt5",)}, "expected one of transformer, smollm2"),
        (moe, {"shapes": ("llama8b",)}, "has no experts"),
        (moe, {"shapes": ("small",), "ranks": 3}, "do not divide by 3 ranks"),
        (scaling, {"worlds": "1,4"}, "expected counts up to --ranks 2"),
        (scaling, {"worlds": "two"}, "--worlds two"),
    ],
)
def test_a_mistake_is_told_before_anything_runs(module: Any, wrong: dict[str, Any], said: str):
    """Catches a mistake that ends in a traceback of every rank, minutes later."""
    plain: dict[str, Any] = {"dtype": ["float32"], "quick": True, **wrong}
    with pytest.raises(ValueError, match=said):
        module.cases(plain, plain.pop("ranks", 2))


def test_the_planners_times_are_those_of_its_own_functions():
    """Catches the optimizer, which is not measured, in the step; and a layout other than the one that runs."""
    from interlace.bench.decoders import Sizes, config_of
    from interlace.bench.prediction import Prediction
    from interlace.planner import read_architecture, read_cluster

    pytest.importorskip("transformers")
    sizes = Sizes("x", 1024, 2816, 16, 4, 64, layers=4, vocabulary=4096)
    cluster = read_cluster("h100x8")
    architecture = read_architecture(config_of(sizes).to_dict())
    assert (architecture.hidden, architecture.layers, architecture.kv_heads) == (1024, 4, 4)
    one, two = (Prediction(architecture, cluster, n, "bfloat16") for n in (1, 2))
    for phase in ("prefill", "train"):
        assert 0 < two.seconds(phase, 4096) < one.seconds(phase, 4096) < 2.1 * two.seconds(phase, 4096)
        assert one.seconds(phase, 8192) > 1.5 * one.seconds(phase, 4096)
    assert one.seconds("train", 4096) > 2 * one.seconds("prefill", 4096)


def test_rows_that_arrive_rank_by_rank_are_put_expert_by_expert():
    """Catches rows that meet the wrong expert: 2 ranks, 3 experts here, one of them without rows from rank 0."""
    counts = torch.tensor([[2, 0, 1], [1, 2, 1]])
    place = moe.by_expert(counts)
    assert place.tolist() == [0, 1, 3, 4, 5, 2, 6]
    x, router = torch.eye(4), torch.tensor([[9.0, 0, 0, 0], [0, 9, 0, 0], [1, 1, 9, 0]])
    routed = moe.Routed.of(x, router, 1)
    assert sum(routed.counts) == 4
    assert torch.equal(routed.combined(torch.ones(4, 4), 4), torch.ones(4, 4))
