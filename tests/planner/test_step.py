"""Step time against sums done by hand: what each collective costs, what hides it, and the bubble."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from interlace.planner import Cluster, Layout, Link, Training, read_architecture, read_cluster
from interlace.planner.communication import all_gather_seconds
from interlace.planner.compute import fused_seconds, gemm_seconds
from interlace.planner.domain import Group
from interlace.planner.exposed import hidden_behind, ring_cost
from interlace.planner.gradients import Window, gradient_cost
from interlace.planner.pipeline import bubble_fraction
from interlace.planner.step import StepModel

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "intermediate_size": 16384,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}
CLUSTER = read_cluster("h100x8")
TRAINING = Training(global_batch=64, seq=4096)


def timed(training: Training = TRAINING, cluster: Cluster = CLUSTER, **sizes: Any) -> Layout:
    """A layout with its microbatches and time."""
    layout = Layout(**{"dp": 1, "tp": 1, "pp": 1, "cp": 1, "zero": 0, **sizes})
    passes = training.global_batch // (layout.dp * layout.microbatch)
    return StepModel(read_architecture(MODEL), cluster, training).timed(replace(layout, microbatches=passes))


def exposed(layout: Layout, name: str) -> float:
    assert layout.step is not None
    return sum(each.exposed for each in layout.step.collectives if each.name == name)


def test_tensor_parallel_collectives_are_counted_layer_by_layer() -> None:
    """Two gathers and two scatters forward; two gathers, two scatters and two second gathers backward."""
    layout = timed(tp=4)
    (tensor,) = [each for each in layout.step.collectives if each.name == "tensor"]  # type: ignore[union-attr]
    size = 4096 * 4096 * 2.0
    assert tensor.calls == 10 * 16 * 64
    assert tensor.bytes == pytest.approx(10 * 16 * 64 * size * 3 / 4)
    assert tensor.seconds == pytest.approx(10 * 16 * 64 * all_gather_seconds(size, 4, CLUSTER.node))
    assert tensor.link == CLUSTER.node.name


def test_what_a_fused_product_leaves_exposed_is_the_formula() -> None:
    """One layer, one microbatch, by hand: forward gathers and scatters fused, backward beside the weight gradient."""
    size = 4096 * 4096 * 2.0
    seconds = all_gather_seconds(size, 4, CLUSTER.node)
    products = {
        "qkv": gemm_seconds(4096, 3 * 1024, 4096, CLUSTER.device),
        "o": gemm_seconds(4096, 4096, 1024, CLUSTER.device),
        "up": gemm_seconds(4096, 2 * 4096, 4096, CLUSTER.device),
        "down": gemm_seconds(4096, 4096, 4096, CLUSTER.device),
    }

    def fused(name: str) -> float:
        return fused_seconds(products[name], seconds, CLUSTER.device.slowdown) - products[name]

    forward = sum(fused(name) for name in products)
    backward = fused("o") + fused("down")
    backward += 2 * sum(max(0.0, seconds - products[name]) for name in ("qkv", "up"))
    assert exposed(timed(tp=4), "tensor") == pytest.approx(16 * 64 * (forward + backward))


def test_full_recomputation_repeats_forward_work_and_its_collectives() -> None:
    """The recomputed forward gathers and scatters again."""
    plain, again = timed(tp=4), timed(tp=4, recompute="full")
    assert plain.step is not None and again.step is not None
    calls = [next(each.calls for each in one.step.collectives) for one in (plain, again)]  # type: ignore[union-attr]
    assert calls == [10 * 16 * 64, 14 * 16 * 64]
    assert plain.step.recompute == 0.0
    assert again.step.recompute == pytest.approx(plain.step.compute / 3, rel=0.1)


@pytest.mark.parametrize(("passes", "interleave"), [(4, 1), (16, 1), (32, 1), (16, 2), (32, 4)])
def test_the_bubble_of_equal_stages_is_the_formula(passes: int, interleave: int) -> None:
    """Relative to the pipelined time; the head makes the last stage a little longer than the others."""
    schedule = "interleaved" if interleave > 1 else "1f1b"
    layout = timed(replace(TRAINING, global_batch=passes), pp=4, interleave=interleave, schedule=schedule)
    assert layout.step is not None
    assert layout.step.bubble_fraction == pytest.approx(bubble_fraction(4, passes, interleave), rel=0.03)


def test_the_pipeline_waits_for_its_slowest_stage() -> None:
    """15 layers over 4 stages: the stages with four set the pace, so three quarters of the rest is not enough."""
    even = timed(pp=4)
    longer = StepModel(read_architecture({**MODEL, "num_hidden_layers": 15}), CLUSTER, TRAINING)
    uneven = longer.timed(Layout(1, 1, 4, 1, zero=0, microbatches=64))
    assert even.step is not None and uneven.step is not None
    assert uneven.step.compute == pytest.approx(even.step.compute, rel=0.02)


def test_pipeline_messages_and_what_of_them_is_exposed() -> None:
    """Each pass sends forward and back; filling and draining is all that shows on a fast link."""
    layout = timed(pp=4)
    (pipeline,) = [each for each in layout.step.collectives if each.name == "pipeline"]  # type: ignore[union-attr]
    size = 4096 * 4096 * 2.0
    send = CLUSTER.node.latency + size / CLUSTER.node.rate
    assert (pipeline.calls, pipeline.bytes) == (128, 128 * size)
    assert pipeline.exposed == pytest.approx(6 * send)


def test_ring_messages_hide_behind_attention_until_it_is_too_short() -> None:
    """The exposed part is what is left of each message, never more than the message."""
    group = Group.of(CLUSTER, 4)
    message = group.send(1e6)
    hidden, bare = ring_cost(1e6, group, 1.0, CLUSTER.device), ring_cost(1e6, group, 0.0, CLUSTER.device)
    assert (hidden.seconds, hidden.bytes) == (pytest.approx(3 * message), 3e6)
    assert bare.exposed == pytest.approx(3 * message)
    assert hidden.exposed == pytest.approx(3 * message * CLUSTER.device.slowdown)


def test_zero_stages_move_what_the_zero_paper_says() -> None:
    """0 and 1 move the same, 2 scatters every pass, 3 gathers twice and scatters once every pass."""
    group, window = Group.of(CLUSTER, 8), Window(1.0, 2.0, 10)
    moved = [gradient_cost(2e9, 2e9, group, zero, 4, window) for zero in range(4)]
    share = 7 / 8 * 2e9
    assert [cost.bytes for cost in moved] == pytest.approx([2 * share, 2 * share, 5 * share, 12 * share])
    # everything but the last bucket hides behind seconds of computation
    assert moved[1].exposed == pytest.approx(moved[1].seconds / 10)


def test_hidden_behind_leaves_the_last_bucket_or_what_is_too_much() -> None:
    """Neither a window that is too short nor the last bucket is free."""
    assert hidden_behind(1.0, 5.0, 4) == 0.25
    assert hidden_behind(7.0, 5.0, 4) == 2.0
    assert hidden_behind(0.0, 5.0, 4) == 0.0


def test_groups_that_fill_nodes_use_all_their_ports() -> None:
    """64 ranks in full nodes gather over 8 ports per node, 8 ranks one per node over one port each."""
    full, thin = Group.of(CLUSTER, 64), Group.of(CLUSTER, 8, 8)
    assert (full.inside, full.nodes, thin.inside, thin.nodes) == (8, 8, 1, 8)
    assert full.all_gather(8e9) < thin.all_gather(8e9) / 2
    assert full.all_gather(8e9) >= all_gather_seconds(8e9, 8, CLUSTER.node)
    assert full.all_reduce(8e9) <= 2 * full.all_gather(8e9)
    assert full.all_to_all(8e9) < thin.all_to_all(8e9) * 2


def test_a_slower_link_never_makes_a_step_faster() -> None:
    """Exposed time grows with the time on the wire, whatever the axis."""
    slow = replace(CLUSTER, node=replace(CLUSTER.node, bandwidth=CLUSTER.node.bandwidth / 20))
    for sizes in ({"tp": 4}, {"cp": 4}, {"pp": 4}, {"dp": 8, "zero": 3}):
        assert timed(cluster=slow, **sizes).seconds > timed(**sizes).seconds
    assert isinstance(slow.node, Link)


def test_placement_puts_tensor_parallelism_into_the_node() -> None:
    """The most frequent collectives get stride 1; every axis names the link its groups cross."""
    axes = {axis.name: axis for axis in timed(dp=2, tp=4, pp=2, cp=2, zero=1).placement}
    assert (axes["tp"].stride, axes["cp"].stride) == (1, 4)
    assert (axes["tp"].link, axes["cp"].link) == (CLUSTER.node.name, CLUSTER.node.name)
    assert {axes["dp"].stride, axes["pp"].stride} == {8, 16}
    assert CLUSTER.fabric is not None and axes["dp"].link == axes["pp"].link == CLUSTER.fabric.name


def test_mfu_tokens_and_days_are_the_definitions() -> None:
    """Model FLOP over what the GPUs could do; days and GPU-hours of the whole run."""
    layout = timed(replace(TRAINING, tokens=1e12), dp=8, zero=1)
    peak = CLUSTER.device.peak["bf16"]
    assert layout.tokens_per_second == pytest.approx(64 * 4096 / layout.seconds)
    assert layout.mfu == pytest.approx(layout.flops / layout.seconds / (8 * peak))
    assert layout.days == pytest.approx(1e12 / layout.tokens_per_second / 86400)
    assert layout.gpu_hours == pytest.approx(layout.days * 24 * 8)
    assert 0.2 < layout.mfu < 0.8
