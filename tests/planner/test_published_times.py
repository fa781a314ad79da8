"""Step times of published runs within 10 %, with one efficiency per GPU type and nothing adjusted by row."""

from __future__ import annotations

import pytest

from interlace.planner.architecture import read_architecture
from interlace.planner.cluster import read_cluster
from interlace.planner.compute import layer_seconds, peak_flops
from interlace.planner.layout import Layout
from interlace.planner.model import count_parameters, flops_per_token
from tests.planner import published
from tests.planner.published import Run, hardware, planned, tokens_per_gpu

WITHIN = 0.10


def megatron_flops(run: Run) -> float:
    """FLOP of one step with recomputation, arXiv 2104.04473 section 5.1."""
    h, layers, s, vocab = run.model.hidden, run.model.layers, run.seq, run.model.vocab
    return 96 * run.batch * s * layers * h * h * (1 + s / (6 * h) + vocab / (16 * layers * h))


def without_overlap(layout: Layout) -> float:
    """Seconds of a step in which every tensor- and data-parallel collective waits, as in the Megatron of 2021.

    A year later the backward's sums ran beside the weight gradients, which is what the planner counts at least.
    """
    assert layout.step is not None
    hidden = [
        each.seconds - each.exposed for each in layout.step.collectives if each.name in ("tensor", "data")
    ]
    return layout.seconds + sum(hidden)


@pytest.mark.parametrize("run", published.ITERATIONS, ids=lambda run: run.name)
def test_iteration_times_of_the_recomputation_paper(run: Run) -> None:
    """A recomputed layer, a bubble or a collective counted wrongly moves one of the modes, not both."""
    layout = planned(run, hardware("a100x8", fused=False))
    assert layout.seconds == pytest.approx(run.value, rel=WITHIN)


@pytest.mark.parametrize("run", published.WEAK_SCALING, ids=lambda run: run.name)
def test_weak_scaling_to_a_trillion_parameters(run: Run) -> None:
    """From one GPU per model to 512: no term may grow too fast with hidden size, stages or replicas."""
    cluster = hardware("a100x8", fused=False)
    sizes = (1, 2, 4, 8, 16) if run.pp == 1 else (1,)
    best = min(without_overlap(planned(run, cluster, size)) for size in sizes)
    assert megatron_flops(run) / best / run.gpus / 1e12 == pytest.approx(run.value, rel=WITHIN)


@pytest.mark.parametrize("run", published.STRONG_SCALING, ids=lambda run: run.name)
def test_strong_scaling_at_a_fixed_batch(run: Run) -> None:
    """Fewer micro-batches per pipeline make a larger bubble: 153 to 141 and 171 to 159 TFLOP/s."""
    seconds = without_overlap(planned(run, hardware("a100x8", fused=False)))
    assert megatron_flops(run) / seconds / run.gpus / 1e12 == pytest.approx(run.value, rel=WITHIN)


@pytest.mark.parametrize("run", published.TITAN_A100, ids=lambda run: run.name)
def test_fully_sharded_training_on_a100(run: Run) -> None:
    """ZeRO-3 gathers and scatters hide behind the layers at 8192 tokens."""
    assert tokens_per_gpu(run, planned(run, hardware("a100x8", fused=False))) == pytest.approx(
        run.value, rel=WITHIN
    )


@pytest.mark.parametrize("run", published.H100_FP8, ids=lambda run: run.name)
def test_eight_bit_training_on_h100(run: Run) -> None:
    """Casts, wide attention and wide head keep 8-bit training far from twice the speed of BF16."""
    assert tokens_per_gpu(run, planned(run, hardware("h100x8", fused=True))) == pytest.approx(
        run.value, rel=WITHIN
    )


@pytest.mark.parametrize("run", published.LLAMA_3, ids=lambda run: run.name)
def test_llama_3_405b_on_sixteen_thousand_gpus(run: Run) -> None:
    """The same efficiency as for 8 bits: 430, 400 and 380 TFLOP/s, the last with attention over 131,072 tokens."""
    layout = planned(run, hardware("h100x8", fused=True))
    assert layout.flops / layout.seconds / run.gpus / 1e12 == pytest.approx(run.value, rel=WITHIN)


@pytest.mark.parametrize(
    ("preset", "run"),
    [
        *(("b200x8", run) for run in published.B200_FP8),
        *(("gb200-nvl72", run) for run in published.GB200_FP8),
    ],
    ids=lambda item: item if isinstance(item, str) else item.name,
)
def test_eight_bit_training_on_blackwell(preset: str, run: Run) -> None:
    """One efficiency each for B200 and GB200."""
    assert tokens_per_gpu(run, planned(run, hardware(preset, fused=True))) == pytest.approx(
        run.value, rel=WITHIN
    )


@pytest.mark.parametrize(
    ("recompute", "sequence_parallel", "forward", "backward"),
    [
        ("none", False, 7.7, 11.9),
        ("none", True, 7.2, 11.8),
        ("selective", True, 7.2, 13.1),
        ("full", False, 7.7, 19.5),
    ],
)
def test_layer_times_of_the_recomputation_paper(
    recompute: str, sequence_parallel: bool, forward: float, backward: float
) -> None:
    """Milliseconds of one layer of the 22B model, arXiv 2205.05198 table 4, with its collectives.

    The forward waits for its collectives, the backward hides them behind the weight gradients.
    """
    cluster = hardware("a100x8", fused=False)
    model = published.gpt(6144, 48, 64)
    layer = layer_seconds(
        model,
        0,
        cluster.device,
        seq=2048,
        microbatch=4,
        tp=8,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
        flash=False,
    )
    message = 2048 * 4 * 6144 * 2
    waits = 2 * 2 * 7 / 8 * message / cluster.node.rate
    again = waits if recompute == "full" else 0.0
    assert 1e3 * (layer.forward + waits) == pytest.approx(forward, rel=WITHIN)
    assert 1e3 * (layer.backward + layer.recompute + again) == pytest.approx(backward, rel=WITHIN)


def test_floating_point_operations_are_megatron_s() -> None:
    """F = 96 B s l h^2 (1 + s / 6h + V / 16 l h) with recomputation, which counts the head's forward once."""
    for run in published.WEAK_SCALING:
        ours = flops_per_token(run.model, run.seq, causal=False, recompute="full") * run.batch * run.seq
        assert ours == pytest.approx(megatron_flops(run), rel=1e-9)


def test_training_days_of_gpt_3_and_of_a_trillion_parameters() -> None:
    """8 T P / (n X): 34 days for 175B, 300 B tokens, 1024 GPUs at 140; 84 for 1T, 450 B, 3072 at 163 (2104.04473)."""
    for model, tokens, gpus, rate, days in (
        (published.GPT_175B, 300e9, 1024, 140e12, 34),
        (published.GPT_1T, 450e9, 3072, 163e12, 84),
    ):
        total = count_parameters(model)[0]
        assert 8 * tokens * total / (gpus * rate) / 86400 == pytest.approx(days, rel=0.02)
        ours = flops_per_token(model, 2048, causal=False, recompute="full") * tokens / (gpus * rate) / 86400
        assert ours == pytest.approx(days, rel=0.05)


def test_the_cost_of_deepseek_v3() -> None:
    """2.664 M H800 hours for 14.8 T tokens are 180 K hours and 3.7 days per T on 2048 GPUs (arXiv 2412.19437).

    Its FLOP give a utilisation between a third and a half of the BF16 peak, as for dense models of that year; without
    the active count (all experts instead of 9) it would be above 1.
    """
    model = read_architecture("deepseek-v3")
    hours, tokens = 2.664e6, 14.8e12
    assert hours / 14.8 == pytest.approx(180e3, rel=0.005)
    assert hours / 14.8 / 2048 / 24 == pytest.approx(3.7, rel=0.02)
    assert (2664 + 119 + 5) / 1e3 == 2.788
    peak = peak_flops(read_cluster("h800x8").device, "bf16")
    utilisation = flops_per_token(model, 4096) * tokens / (hours * 3600 * peak)
    assert 0.33 < utilisation < 0.5
