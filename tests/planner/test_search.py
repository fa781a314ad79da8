"""The search: which layouts are legal, that pruning loses none, memory limits, and why the others lost."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

import interlace
from interlace.planner import DoesNotFit, Layout, Training, layout_reasons, read_architecture, read_cluster
from interlace.planner.ranking import causes
from interlace.planner.search import MICROBATCHES, legal_layouts
from interlace.planner.stages import MemoryModel
from interlace.planner.step import StepModel

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 5632,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


def test_the_dense_70b_at_32k_on_512_gpus_lists_8_4_4_4() -> None:
    """The published example: a rule that refuses it, or a product that is not the world, shows here."""
    layouts = interlace.plan("llama-3.1-70b", cluster="h100x8", gpus=512, seq=32768, global_batch=512)
    sizes = {(layout.dp, layout.tp, layout.pp, layout.cp) for layout in layouts}
    assert (8, 4, 4, 4) in sizes
    assert all(layout.world_size == 512 for layout in layouts)
    assert all(layout.fits and layout.margin == layout.limit - layout.memory for layout in layouts)
    assert [layout.seconds for layout in layouts] == sorted(layout.seconds for layout in layouts)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"tp": 16}, "spans nodes of 8"),
        ({"tp": 5}, "does not divide 12 heads"),
        ({"tp": 3}, "4 key/value heads"),
        ({"cp": 3, "dp": 4}, "2 x cp = 6"),
        ({"pp": 5, "interleave": 4}, "12 layers do not divide into pp x interleave = 5 x 4"),
        ({"interleave": 2}, "needs more than one stage"),
        ({"ep": 2}, "no experts"),
        ({"dp": 3}, "global batch 64 does not divide"),
        ({"pp": 4, "interleave": 3, "dp": 32}, "multiples of pp=4"),
    ],
)
def test_an_illegal_size_is_refused_with_its_reason(sizes: dict[str, int], words: str) -> None:
    """A rule that is missing lets a layout through that cannot be built."""
    reasons = layout_reasons(read_architecture(SMALL), read_cluster("h100x8"), Training(64, 4096), **sizes)
    assert any(words in reason for reason in reasons), reasons


def test_legal_layouts_have_no_reasons_and_replicated_kv_heads_are_legal() -> None:
    """Enumeration and check are the same rules; tp above the kv heads is legal when it is a multiple."""
    arch, cluster = read_architecture({**SMALL, "num_attention_heads": 16}), read_cluster("h100x8")
    training = Training(64, 4096)
    found = list(legal_layouts(arch, cluster, training, 16))
    for one in found:
        sizes = {
            name: getattr(one, name) for name in ("dp", "tp", "pp", "cp", "ep", "interleave", "microbatch")
        }
        assert layout_reasons(arch, cluster, training, **sizes) == []
        assert one.world_size == 16
        assert one.dp * one.microbatch * one.microbatches == 64
    assert {one.tp for one in found} == {1, 2, 4, 8}


def test_experts_divide_dp_cp_tp() -> None:
    """EP takes ranks from DP x CP x TP, never from PP, and divides the experts."""
    layouts = interlace.plan("mixtral-8x7b", cluster="h100x8", gpus=16, seq=4096, global_batch=32)
    assert {layout.ep for layout in layouts} > {1, 8}
    for layout in layouts:
        assert (layout.dp * layout.cp * layout.tp) % layout.ep == 0
        assert 8 % layout.ep == 0


@pytest.mark.parametrize(("model", "gpus"), [(SMALL, 16), ("qwen1.5-moe-a2.7b", 8)])
def test_pruning_finds_what_brute_force_finds(model: Any, gpus: int) -> None:
    """Skipped candidates must not have been better: every mesh has the step time of an exhaustive search."""
    arch, cluster, training = read_architecture(model), read_cluster("l20x8"), Training(64, 4096)
    limit = cluster.device.memory * 0.95
    memory, steps = MemoryModel(arch, cluster, training, limit), StepModel(arch, cluster, training)
    best: dict[tuple[int, ...], float] = {}
    for mesh in legal_layouts(arch, cluster, training, gpus):
        for zero, recompute in product(range(4), ("none", "selective", "full")):
            if zero and mesh.dp * mesh.cp == 1:
                continue
            layout = memory.measured(replace(mesh, zero=zero, recompute=recompute))
            if layout.fits:
                key = (mesh.dp, mesh.tp, mesh.pp, mesh.cp, mesh.ep)
                best[key] = min(best.get(key, float("inf")), steps.timed(layout).seconds)
    found = interlace.plan(arch, cluster=cluster, gpus=gpus, training=training)
    assert {(one.dp, one.tp, one.pp, one.cp, one.ep): one.seconds for one in found} == pytest.approx(best)


@pytest.mark.parametrize(
    ("model", "gpus"), [("llama-3.1-8b", 64), ("deepseek-v2-lite", 54), ("deepseek-v3", 32), (SMALL, 5)]
)
def test_cached_memory_is_the_memory_of_every_stage(model: Any, gpus: int) -> None:
    """The search looks at few stages with cached parts; dense first layers and short ends must not mislead it."""
    arch, cluster, training = read_architecture(model), read_cluster("h100x8"), Training(54 * 64, 4096)
    memory = MemoryModel(arch, cluster, training, cluster.device.memory)
    meshes = list(legal_layouts(arch, cluster, training, gpus))
    deep = [mesh for mesh in meshes if mesh.pp > 2]
    assert deep
    for mesh in [*meshes[::17], *deep[:: len(deep) // 40 + 1]]:
        for zero, recompute in ((1, "none"), (3, "full")):
            layout = replace(mesh, zero=zero, recompute=recompute)
            assert memory.fullest(layout) == pytest.approx(memory.measured(layout).memory, rel=1e-9)


def test_options_that_are_given_are_kept() -> None:
    """A fixed ZeRO stage, recomputation or schedule is not searched over."""
    layouts = interlace.plan(
        SMALL,
        cluster="h100x8",
        gpus=16,
        seq=4096,
        global_batch=64,
        zero=3,
        recompute="full",
        schedule="gpipe",
    )
    assert {(one.zero, one.recompute) for one in layouts} == {(3, "full")}
    assert {one.schedule for one in layouts if one.pp > 1} == {"gpipe"}
    assert len(interlace.plan(SMALL, cluster="h100x8", gpus=16, seq=4096, global_batch=64, top=2)) == 2


def test_more_memory_is_never_slower_and_less_needs_more_recomputation() -> None:
    """Recomputation appears only where memory is short."""
    given: dict[str, Any] = {"gpus": 8, "seq": 8192, "global_batch": 64, "zero": 3}
    roomy = interlace.plan("llama-3.1-8b", cluster="h200x8", **given)
    tight = interlace.plan("llama-3.1-8b", cluster="h200x8", headroom=0.85, **given)
    assert roomy[0].seconds <= tight[0].seconds
    assert {one.recompute for one in roomy} == {"none"}
    assert "full" in {one.recompute for one in tight}


def test_what_does_not_fit_names_the_smallest_that_does() -> None:
    """The GPUs the message names must really fit, and half of them must not."""
    given: dict[str, Any] = {"cluster": "h100x8", "seq": 8192, "global_batch": 64}
    with pytest.raises(DoesNotFit, match=r"nothing fits 8 x .* needs .* GB; smallest that fits is") as caught:
        interlace.plan("llama-3.1-405b", gpus=8, **given)
    gpus = int(str(caught.value).partition("smallest that fits is ")[2].split()[0])
    assert interlace.plan("llama-3.1-405b", gpus=gpus, **given)
    with pytest.raises(DoesNotFit):
        interlace.plan("llama-3.1-405b", gpus=gpus // 2, **given)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpus": 0}, "gpus=0"),
        ({"gpus": 12}, "use 8 or 16"),
        ({"gpus": 7, "model": {**SMALL, "num_hidden_layers": 3}}, "no layout of 7 GPUs is legal"),
        ({"seq": 0}, "needs seq and global_batch"),
        ({"global_batch": -4}, "global_batch=-4"),
        ({"headroom": 1.0}, "headroom"),
        ({"dtype": "fp12"}, "fp12"),
        ({"optimizer": "lion"}, "lion"),
        ({"zero": 4}, "zero=4"),
        ({"cluster": "a100x8", "dtype": "fp8"}, "no peak for fp8"),
    ],
)
def test_bad_arguments_are_one_line(changes: dict[str, Any], words: str) -> None:
    """What came and what to do, in one line."""
    given = {"model": SMALL, "cluster": "h100x8", "gpus": 16, "seq": 4096, "global_batch": 64, **changes}
    with pytest.raises(ValueError, match=r"\S") as caught:
        interlace.plan(given.pop("model"), **given)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_losses_name_the_causes_that_are_slower() -> None:
    """The causes add up to the step, and the one named first is the largest difference to the best."""
    layouts = interlace.plan("llama-3.1-8b", cluster="h100x8", gpus=32, seq=8192, global_batch=128)
    best = layouts[0]
    assert best.lost == ""
    for layout in layouts:
        assert sum(causes(layout).values()) == pytest.approx(layout.seconds)
    for layout in layouts[1:]:
        ours, theirs = causes(layout), causes(best)
        worst = max(ours, key=lambda name: ours[name] - theirs.get(name, 0.0))
        assert f": {worst} " in layout.lost


def test_thousands_of_candidates_take_two_seconds_of_processor() -> None:
    """Processor time, so that a busy machine does not fail it; twice the goal, for slow processors."""
    arch, cluster, training = read_architecture("mixtral-8x7b"), read_cluster("h100x8"), Training(256, 8192)
    candidates = sum(len(range(4)) for _ in legal_layouts(arch, cluster, training, 64))
    begin = time.process_time()
    assert interlace.plan(arch, cluster=cluster, gpus=64, training=training)
    assert candidates > 3000
    assert time.process_time() - begin < 4.0


def test_layouts_are_frozen_and_plain_data() -> None:
    """What --json prints has no objects left and holds the derived numbers."""
    layout = interlace.plan(SMALL, cluster="h100x8", gpus=8, seq=4096, global_batch=64)[0]
    with pytest.raises(AttributeError):
        layout.tp = 2  # type: ignore[misc]
    record = layout.to_dict()
    assert record["world_size"] == 8
    assert record["step"]["total"] == pytest.approx(layout.seconds)
    assert record["memory"] == max(stage["total"] for stage in record["stages"])
    assert isinstance(layout, Layout)
    assert max(MICROBATCHES) >= layout.microbatch
