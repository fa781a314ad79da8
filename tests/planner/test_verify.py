"""Predicted against measured time on this machine, by the machine's own profile; and what a record must hold."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from interlace.planner.cluster import read_cluster, write_cluster
from interlace.planner.measure import fit_link, measure
from interlace.planner.verify import verify
from interlace.train.session import run
from interlace.train.settings import Settings
from tests.distributed import run_distributed

SIZES = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4}
CONFIG = SIZES | {
    "model_type": "llama",
    "intermediate_size": 1024,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
}
# A machine that runs other work shares its cores differently while it is measured and while it trains.
FACTOR, ATTEMPTS = 3.0, 3


def _train(rank: int, world_size: int, settings: dict[str, Any]) -> None:
    threads = torch.get_num_threads()
    run(settings)
    torch.set_num_threads(threads)
    gc.collect()


def test_step_times_are_those_of_this_machine(tmp_path: Path) -> None:
    """A profile measured here predicts steps of one replica and of two tensor-parallel ranks within a factor.

    Units that slip (ms for s, bits for bytes, FLOP for multiply-adds twice) are off by more, on any machine.
    """
    model, ratios = tmp_path / "config.json", []
    model.write_text(json.dumps(CONFIG))
    for _ in range(ATTEMPTS):
        cluster = measure(tmp_path / "here.yaml", quick=True)
        ratios = []
        for name, tp in (("dp2", 1), ("tp2", 2)):
            out = str(tmp_path / f"{name}.json")
            sizes = {"global_batch": 4, "microbatch": 2, "seq": 256, "steps": 4, "track": False, "out": out}
            settings = Settings(model=str(model), dp=2 // tp, tp=tp, sequence_parallel=False, **sizes)
            run_distributed(2, _train, settings.as_dict(), timeout=180.0)
            (row,) = [row for row in verify(out, cluster) if row.unit == "seconds"]
            assert row.measured > 0
            ratios.append(row.predicted / row.measured)
        if all(1 / FACTOR < ratio < FACTOR for ratio in ratios):
            break
    assert all(1 / FACTOR < ratio < FACTOR for ratio in ratios), ratios
    assert read_cluster(tmp_path / "here.yaml") == cluster
    assert cluster.devices_per_node == 2 and cluster.device.gemms and cluster.device.fused
    assert "gloo all_reduce" in cluster.measured


def test_a_link_is_fitted_to_its_points() -> None:
    """Latency and bandwidth come back from points the formula made, noise or not at the extremes."""
    sizes = [4e3, 64e3, 1e6, 16e6]
    link = fit_link("link", [[size, 20e-6 + size / 5e9] for size in sizes], 2)
    assert link.latency == pytest.approx(20e-6, rel=1e-3) and link.bandwidth == pytest.approx(5e9, rel=1e-3)
    assert fit_link("flat", [[size, 1e-3] for size in sizes], 2).latency == pytest.approx(1e-3)
    assert fit_link("steep", [[size, size / 5e9] for size in sizes], 4).bandwidth == pytest.approx(7.5e9)


def _record(**changes: Any) -> dict[str, Any]:
    settings = Settings(model="gpt2").as_dict() | {"world_size": 1, "microbatches": 8}
    content: dict[str, Any] = {
        "format": 1,
        "settings": settings,
        "model": CONFIG,
        "memory": [],
        "step_seconds": 1.0,
    }
    return content | changes


def test_errors_are_relative_to_what_was_measured(tmp_path: Path) -> None:
    """Half predicted is -50 %; a category below 5 % of the peak is not large."""
    memory = [
        {"stage": 0, "parameters": 10, "gradients": 10**12, "optimizer": 1, "activations": 1, "peak": 10**12}
    ]
    rows = {row.name: row for row in verify(_record(memory=memory))}
    assert rows["gradients"].error == pytest.approx(rows["gradients"].predicted / 1e12 - 1)
    assert rows["peak"].large and not rows["parameters"].large
    path = tmp_path / "cpu.yaml"
    write_cluster(read_cluster("cpu"), path)
    (row,) = verify(_record(), path)
    assert (row.unit, row.measured) == ("seconds", 1.0) and row.predicted > 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "Expecting"),
        ("[]", "no record"),
        ("{}", "no record"),
        (json.dumps(_record(format=2)), "format=2"),
    ],
)
def test_a_file_that_is_no_record(tmp_path: Path, content: str, words: str) -> None:
    """One line that names the file."""
    path = tmp_path / "run.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=words) as caught:
        verify(path)
    assert "run.json" in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="none"):
        verify(tmp_path / "none.json")
