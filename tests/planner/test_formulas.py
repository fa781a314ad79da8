"""Formulas against the numbers their papers print, and their edges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from interlace.planner.activations import ActivationShape, layer_activation_bytes
from interlace.planner.architecture import read_architecture
from interlace.planner.communication import (
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    best_all_reduce,
    hierarchical_all_reduce_seconds,
    reduce_scatter_seconds,
    send_seconds,
)
from interlace.planner.compute import fused_seconds, gemm_efficiency, gemm_seconds, measured_fused_seconds
from interlace.planner.hardware import Device, FusedPoint, GemmPoint, Link
from interlace.planner.memory import (
    MemoryBreakdown,
    Precision,
    activation_bytes_per_layer,
    kv_cache_bytes_per_token,
    logits_bytes,
    stage_memory,
    zero_bytes,
)
from interlace.planner.model import parameters, stage_parameters
from interlace.planner.pipeline import bubble_fraction, bubble_of_ideal, in_flight_microbatches, stage_layers
from tests.planner.published import gpt

LINK = Link("link", bandwidth=100e9, latency=1e-6, ranks=8, multicast=True, efficiency=1.0)
DEVICE = Device("device", memory=80e9, peak={"bf16": 1e15}, memory_bandwidth=1e12, kernel_latency=0.0)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 1120), (1, 293), (2, 155), (3, 17.5)])
def test_states_of_70b_on_64_gpus(stage: int, gigabytes: float) -> None:
    """DDP and the three stages of ZeRO, decimal gigabytes (arXiv 1910.02054)."""
    assert zero_bytes(70e9, 64, stage) / 1e9 == pytest.approx(gigabytes, rel=2.5e-3)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_figure_1_of_the_zero_paper(stage: int, gigabytes: float) -> None:
    """7.5 B parameters on 64 GPUs."""
    assert zero_bytes(7.5e9, 64, stage) / 1e9 == pytest.approx(gigabytes, rel=5e-3)


def test_table_1_of_the_zero_paper() -> None:
    """Gigabytes per device for 7.5 B, 128 B and 1 T parameters on 1, 64 and 1024 devices."""
    for params, ranks, row in (
        (7.5e9, 1, (120, 120, 120)),
        (7.5e9, 64, (31.4, 16.6, 1.88)),
        (7.5e9, 1024, (30.1, 15.1, 0.12)),
        (128e9, 64, (536, 284, 32.0)),
        (128e9, 1024, (513, 257, 2.0)),
        (1e12, 64, (4187, 2218, 250)),
        (1e12, 1024, (4011, 2013, 15.6)),
    ):
        for stage, gigabytes in zip((1, 2, 3), row, strict=True):
            assert zero_bytes(params, ranks, stage) / 1e9 == pytest.approx(gigabytes, rel=0.03)


def test_kv_cache_of_llama_70b() -> None:
    """327,680 bytes per token; 10.7 GB at 32,768 tokens; a copy of a head where ranks outnumber heads."""
    per_token = kv_cache_bytes_per_token("llama-3.1-70b", "bf16")
    assert per_token == 327_680
    assert per_token * 32_768 / 1e9 == pytest.approx(10.7, abs=0.05)
    assert kv_cache_bytes_per_token("llama-3.1-70b", "fp8", tp=8) == 327_680 / 16
    assert kv_cache_bytes_per_token("llama-3.1-70b", "bf16", tp=16) == 327_680 / 8


def test_latent_cache_of_deepseek() -> None:
    """70 KB per token for DeepSeek-V3 (576 values x 61 layers x 2 bytes), whatever the ranks."""
    assert kv_cache_bytes_per_token("deepseek-v3") == 576 * 61 * 2 == 70_272
    assert kv_cache_bytes_per_token("deepseek-v3", tp=8) == 70_272


@pytest.mark.parametrize(("microbatches", "fraction"), [(4, 3 / 7), (16, 3 / 19), (32, 3 / 35)])
def test_bubbles_of_four_stages(microbatches: int, fraction: float) -> None:
    """(p - 1) / (m + p - 1), relative to the whole time."""
    assert bubble_fraction(4, microbatches) == pytest.approx(fraction, rel=1e-12)
    ideal = bubble_of_ideal(4, microbatches)
    assert ideal / (1 + ideal) == pytest.approx(fraction, rel=1e-12)


def test_interleaving_divides_the_bubble() -> None:
    """v chunks per stage: (p - 1) / (v m + p - 1); zero bubble leaves a third of 1F1B's idle time."""
    assert bubble_fraction(4, 8, interleave=2) == pytest.approx(3 / 19)
    assert bubble_of_ideal(4, 8, 3) == pytest.approx(3 / 24)
    assert bubble_of_ideal(4, 8, schedule="zero_bubble") == pytest.approx(1 / 8)


def test_the_bubble_is_that_of_a_simulated_schedule() -> None:
    """1F1B simulated slot by slot, forward 1 and backward 2 units: idle share equals the formula."""
    for stages, microbatches in ((2, 2), (3, 5), (4, 4), (4, 16)):
        done: dict[tuple[str, int, int], float] = {}
        orders = []
        for stage in range(stages):
            warm = min(microbatches, stages - stage - 1)
            order = [("f", i) for i in range(warm)]
            for i in range(microbatches - warm):
                order += [("f", warm + i), ("b", i)]
            orders.append(order + [("b", i) for i in range(microbatches - warm, microbatches)])
        free, position = [0.0] * stages, [0] * stages
        while any(position[s] < 2 * microbatches for s in range(stages)):
            for s in range(stages):
                while position[s] < 2 * microbatches:
                    kind, i = orders[s][position[s]]
                    before = (kind, i, s - 1) if kind == "f" else (kind, i, s + 1)
                    inside = 0 <= before[2] < stages
                    if inside and before not in done:
                        break
                    free[s] = max(free[s], done[before] if inside else 0.0) + (1 if kind == "f" else 2)
                    done[kind, i, s] = free[s]
                    position[s] += 1
        assert 1 - 3 * microbatches / max(free) == pytest.approx(bubble_fraction(stages, microbatches))


def test_in_flight_microbatches_by_schedule() -> None:
    """GPipe keeps all; 1F1B stages - stage; interleaving 1 + (p - 1) / (p v) times p on the first stage."""
    assert in_flight_microbatches(4, 16, 0, schedule="gpipe") == 16
    assert [in_flight_microbatches(4, 16, s) for s in range(4)] == [4, 3, 2, 1]
    assert in_flight_microbatches(4, 2, 0) == 2
    assert in_flight_microbatches(8, 64, 0, 3, "interleaved") == pytest.approx(8 * (1 + 7 / 24))


def test_stages_hold_every_layer_once() -> None:
    """Chunk c of stage s is part c p + s; remainders go to the middle."""
    assert stage_layers(16, 2, 2) == ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))
    assert [len(stage) for stage in stage_layers(10, 4)] == [2, 3, 3, 2]
    for layers, stages, chunks in ((80, 8, 5), (61, 16, 1), (126, 16, 7), (7, 3, 2)):
        held = sorted(layer for stage in stage_layers(layers, stages, chunks) for layer in stage)
        assert held == list(range(layers))


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "recompute", "per_sbh"),
    [
        (1, False, "none", 34 + 80),
        (8, False, "none", 10 + 24 / 8 + 80 / 8),
        (8, True, "none", 34 / 8 + 80 / 8),
        (8, False, "selective", 10 + 24 / 8),
        (8, True, "selective", 34 / 8),
        (8, False, "full", 2),
    ],
)
def test_activation_table_of_gpt_3(tp: int, sequence_parallel: bool, recompute: str, per_sbh: float) -> None:
    """Table 2 of arXiv 2205.05198 for GPT-3 (5 a s / h = 80), and our count of its layer's tensors one by one."""
    got = activation_bytes_per_layer(2048, 1, 12288, 96, tp, sequence_parallel, recompute)
    assert got / (2048 * 12288) == pytest.approx(per_sbh, rel=1e-12)
    shape = ActivationShape(2048, 1, tp, sequence_parallel=sequence_parallel, flash=False, dropout=True)
    counted = layer_activation_bytes(gpt(12288, 96, 96), 0, shape, recompute)
    assert counted == pytest.approx(got, rel=1e-12)


def test_selective_recomputation_saves_what_the_paper_says() -> None:
    """70 % of the activations for GPT-3 and 65 % for MT-NLG."""
    for hidden, heads, saved in ((12288, 96, 0.70), (20480, 128, 0.65)):
        whole = activation_bytes_per_layer(2048, 1, hidden, heads, 8, True, "none")
        selective = activation_bytes_per_layer(2048, 1, hidden, heads, 8, True, "selective")
        assert 1 - selective / whole == pytest.approx(saved, abs=0.005)


def test_megatron_s_memory_estimate() -> None:
    """The estimator of Megatron-LM within 5 %: fullest rank's states, and activations with SP and selective.

    States: its parameters x 18 bytes, or x (6 + 12 / dp) with a distributed optimizer. Activations of the first stage:
    s b h (18 + 4 ffn / h) / tp per layer, x layers / p x micro-batches in flight.
    """
    for model, tp, pp, dp, batches in (
        (gpt(12288, 96, 96), 8, 8, 4, 32),
        (gpt(6144, 48, 64), 8, 1, 8, 4),
        (gpt(20480, 105, 128), 8, 35, 8, 280),
    ):
        held = (
            model.layers // pp * (12 * model.hidden**2 + 13 * model.hidden) / tp
            + model.vocab * model.hidden / tp
        )
        for zero, per_parameter in ((0, 18), (1, 6 + 12 / dp)):
            found = stage_memory(
                model,
                pp=pp,
                tp=tp,
                dp=dp,
                zero=zero,
                seq=2048,
                microbatches=batches,
                recompute="selective",
                sequence_parallel=True,
                flash=False,
                dropout=True,
                precision=Precision(gradients=4),
            )
            states = found.parameters + found.gradients + found.optimizer
            assert states == pytest.approx(held * per_parameter, rel=0.05)
            per_layer = 2048 * model.hidden * (18 + 4 * 4) / tp
            assert found.activations == pytest.approx(
                per_layer * model.layers / pp * min(pp, batches), rel=0.05
            )


@pytest.mark.parametrize(
    ("dp", "cp", "seq", "gibibytes"), [(8, 1, 32768, 83.9), (4, 2, 65536, 84.2), (1, 8, 262144, 84.5)]
)
def test_memory_of_torchtitan(dp: int, cp: int, seq: int, gibibytes: float) -> None:
    """Llama 3.1 8B on 8 H100, fully sharded with fp32 states, full recomputation, 32,768 tokens per rank, within 5 %.

    Half of it is the loss over 128,256 words; states are spread over dp x cp. Its published reading is what the
    allocator reserved, so ours is below.
    """
    found = stage_memory(
        read_architecture("llama-3.1-8b"),
        dp=dp,
        cp=cp,
        seq=seq,
        zero=3,
        recompute="full",
        eager=True,
        precision=Precision(4, 4, 8, 2),
    )
    assert found.total / 2**30 == pytest.approx(gibibytes, rel=0.05)
    assert found.total / 2**30 < gibibytes


def test_parameters_of_all_ranks_sum_to_the_model() -> None:
    """Stages x TP x EP shards, replicated parts subtracted, are the model once; a tied table on two stages twice."""
    model = read_architecture("qwen3-30b-a3b")
    counted = parameters(model)
    stages = stage_layers(model.layers, 4)
    held = [
        stage_parameters(counted, model, layers, first=i == 0, last=i == 3, tp=2, ep=4)
        for i, layers in enumerate(stages)
    ]
    replicated = sum(layer.replicated for layer in counted.layers) + counted.first + counted.last
    dense = 2 * sum(part for part, _ in held) - replicated
    assert dense + 4 * sum(part for _, part in held) == pytest.approx(counted.total, rel=1e-12)
    tied = parameters(read_architecture("gemma-2b"))
    ends = [
        stage_parameters(tied, read_architecture("gemma-2b"), (), first=i == 0, last=i == 1)[0]
        for i in (0, 1)
    ]
    assert min(ends) >= tied.embedding


def test_more_kv_shards_than_heads_are_copies() -> None:
    """With 8 kv heads on 16 ranks each rank holds a whole head, not half of one."""
    model = read_architecture("llama-3.1-70b")
    counted = parameters(model)
    none = {"first": False, "last": False}
    by_tp = {tp: stage_parameters(counted, model, (0,), tp=tp, **none)[0] for tp in (8, 16)}
    layer = counted.layers[0]
    assert by_tp[16] == (layer.heads + layer.mlp) / 16 + layer.kv / 8 + layer.replicated


def test_collectives_by_algorithm() -> None:
    """Volumes and steps of each algorithm: 100 MB over 4 ranks at 100 GB/s with 1 us per step."""
    size, second = 100e6, 100e6 / 100e9
    assert all_reduce_seconds(size, 4, LINK, "ring") == pytest.approx(6e-6 + 1.5 * second)
    assert all_reduce_seconds(size, 4, LINK, "tree") == pytest.approx(4e-6 + 2 * second)
    assert all_reduce_seconds(size, 4, LINK, "one_shot") == pytest.approx(1e-6 + 3 * second)
    assert all_reduce_seconds(size, 4, LINK, "two_shot") == pytest.approx(2e-6 + 1.5 * second)
    assert all_reduce_seconds(size, 4, LINK, "multimem") == pytest.approx(2e-6 + 1.25 * second)
    assert all_gather_seconds(size, 4, LINK) == reduce_scatter_seconds(size, 4, LINK)
    fabric = replace(LINK, ranks=0)
    assert all_gather_seconds(size, 4, fabric) == pytest.approx(3e-6 + 0.75 * second)
    assert all_to_all_seconds(size, 4, LINK) == pytest.approx(1e-6 + 0.75 * second)
    assert send_seconds(size, LINK) == pytest.approx(1e-6 + second)
    slow = replace(LINK, bandwidth=10e9, ranks=0)
    assert hierarchical_all_reduce_seconds(size, 4, 2, LINK, slow) == pytest.approx(
        2 * (1e-6 + 0.75 * second) + 2e-6 + 0.25 * 10 * second
    )


def test_the_best_algorithm_changes_with_the_size() -> None:
    """One shot for a decode step, the switch's own reduction for a prefill; none of it alone."""
    assert best_all_reduce(8e3, 8, LINK)[0] == "one_shot"
    assert best_all_reduce(64e6, 8, LINK)[0] == "multimem"
    assert best_all_reduce(64e6, 8, replace(LINK, multicast=False))[0] in ("two_shot", "ring")
    assert best_all_reduce(64e6, 1, LINK)[1] == 0.0
    assert all_reduce_seconds(64e6, 8, LINK, "auto") == best_all_reduce(64e6, 8, LINK)[1]


def test_products_by_roofline_and_by_measured_points() -> None:
    """A thin product is bound by memory; measured points are met exactly and blend between."""
    thin = gemm_seconds(1, 8192, 8192, DEVICE)
    assert thin == pytest.approx(8192 * 8192 * 2 / 0.8e12, rel=0.01)
    wide = gemm_seconds(8192, 8192, 8192, DEVICE)
    assert wide == pytest.approx(2 * 8192**3 / (1e15 * 0.7), rel=0.02)
    points = (GemmPoint(256, 256, 256, 0.3), GemmPoint(4096, 4096, 4096, 0.8))
    table = replace(DEVICE, gemms=points)
    assert gemm_efficiency(256, 256, 256, table) == 0.3
    assert 0.3 < gemm_efficiency(1024, 1024, 1024, table) < 0.8


def test_fused_time_is_between_the_larger_and_the_sum() -> None:
    """max x (1 + slowdown), never more than one after the other; a measured point wins where it is near."""
    assert fused_seconds(3.0, 1.0, 0.1) == pytest.approx(3.3)
    assert fused_seconds(3.0, 0.01, 0.1) == pytest.approx(3.01)
    assert fused_seconds(2.0, 2.0, 1.0) == 4.0
    table = replace(DEVICE, fused=(FusedPoint("gemm_all_reduce", 1024, 4096, 4096, 4, 1e-3),))
    assert measured_fused_seconds("gemm_all_reduce", 1024, 4096, 4096, 4, table) == 1e-3
    assert measured_fused_seconds("gemm_all_reduce", 2048, 4096, 4096, 4, table) == pytest.approx(2e-3)
    assert measured_fused_seconds("gemm_all_reduce", 8192, 4096, 4096, 4, table) is None
    assert measured_fused_seconds("gemm_all_reduce", 1024, 4096, 4096, 2, table) is None


def test_memory_by_stage_follows_the_schedule() -> None:
    """The first stage holds most activations, the last the logits; ZeRO-3 divides what it should."""
    model = read_architecture("llama-3.1-8b")
    common: dict[str, Any] = {"seq": 4096, "pp": 4, "microbatches": 8}
    first, last = (stage_memory(model, stage=stage, **common) for stage in (0, 3))
    assert first.activations > 3.5 * (last.activations - 2 * 4096 * 4096 * 2)
    assert first.logits == 0 and last.logits == logits_bytes(4096, 128256)
    whole = stage_memory(model, seq=4096, dp=8)
    sharded = stage_memory(model, seq=4096, dp=8, zero=3)
    assert sharded.parameters == whole.parameters / 8 and sharded.optimizer == whole.optimizer / 8
    assert MemoryBreakdown(1, 2, 3).total == 6


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: zero_bytes(1e9, 0, 0), "world_size=0"),
        (lambda: zero_bytes(1e9, 8, 4), "stage=4"),
        (lambda: zero_bytes(-1, 8, 0), "params=-1"),
        (lambda: bubble_fraction(0, 4), "stages=0"),
        (lambda: bubble_fraction(4, -1), "microbatches=-1"),
        (lambda: in_flight_microbatches(4, 4, 4), "stage=4"),
        (lambda: stage_layers(3, 4), "3 layers"),
        (lambda: activation_bytes_per_layer(0, 1, 64, 4), "seq=0"),
        (lambda: activation_bytes_per_layer(8, 1, 64, 4, recompute="some"), "recompute='some'"),
        (lambda: kv_cache_bytes_per_token("llama-3.1-8b", "int3"), "int3"),
        (lambda: all_reduce_seconds(1, 2, replace(LINK, multicast=False), "multimem"), "multicast"),
        (lambda: all_reduce_seconds(1, 2, LINK, "star"), "algorithm='star'"),
        (lambda: all_reduce_seconds(-1, 2, LINK), "bytes=-1"),
        (lambda: gemm_seconds(0, 1, 1, DEVICE), "m=0"),
        (lambda: gemm_seconds(1, 1, 1, DEVICE, "fp8"), "no peak for fp8"),
    ],
)
def test_bad_arguments_are_named(call: Any, words: str) -> None:
    """Each names the function's argument and its value."""
    with pytest.raises(ValueError, match=words):
        call()
