"""Serving estimates against sums done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

import interlace
from interlace.planner import DoesNotFit, Layout, Serving, ServingEstimate, read_architecture, read_cluster
from interlace.planner.memory import kv_cache_bytes_per_token
from interlace.planner.model import count_parameters
from interlace.planner.serving import decode_bounds, replica

CLUSTER = read_cluster("h100x8")
SERVING = Serving(concurrency=64, prompt=2048, output=256)


def estimate(layout: Layout) -> ServingEstimate:
    assert layout.serving is not None
    return layout.serving


def test_weights_and_cache_of_a_70b_replica() -> None:
    """bf16 weights over 8 ranks; 327,680 B per token over 8 key/value heads; requests fill what is left."""
    (layout,) = [
        one
        for one in interlace.plan("llama-3.1-70b", cluster=CLUSTER, gpus=8, serving=SERVING)
        if one.tp == 8
    ]
    one, total = estimate(layout), count_parameters("llama-3.1-70b")[0]
    assert one.weight_bytes == pytest.approx(2 * total / 8, rel=0.001)
    assert one.kv_bytes_per_token == kv_cache_bytes_per_token("llama-3.1-70b") / 8 == 40960
    spare = layout.limit - one.weight_bytes - layout.stages[0].temporary - layout.stages[0].reserved
    assert one.max_concurrency == int(spare // (40960 * (2048 + 256)))
    assert layout.stages[0].kv_cache == 64 * (2048 + 256) * 40960


def test_latent_attention_keeps_the_whole_latent_on_every_rank() -> None:
    """DeepSeek-V3's cache does not shrink with tensor parallelism; more ranks only free weights."""
    arch = read_architecture("deepseek-v3")
    per_token = {replica(arch, CLUSTER, SERVING, tp, 1, 1e12).kv_per_token for tp in (1, 2, 4, 8)}
    assert per_token == {(512 + 64) * 61 * 2.0}


def test_decode_is_bound_by_memory_and_grows_with_the_batch() -> None:
    """One request reads all weights; each more adds its cache only."""
    arch = read_architecture("llama-3.1-70b")
    one = replica(arch, CLUSTER, SERVING, 8, 1, 80e9)
    first, many = (decode_bounds(arch, CLUSTER, SERVING, one, batch) for batch in (1, 65))
    rate = CLUSTER.device.memory_bandwidth * CLUSTER.device.memory_efficiency
    cached = (2048 + 128) * one.kv_per_token
    assert first["memory"] == pytest.approx((one.weights + cached) / rate)
    assert many["memory"] - first["memory"] == pytest.approx(64 * cached / rate)
    assert many["compute"] == pytest.approx(65 * first["compute"])
    assert first["memory"] > first["compute"]


def test_a_mixture_reads_more_experts_with_more_requests() -> None:
    """One token reads top_k of the experts, a large batch all of them."""
    arch = read_architecture("mixtral-8x7b")
    one = replica(arch, CLUSTER, replace(SERVING, prompt=1, output=1), 8, 1, 80e9)
    serving = replace(SERVING, prompt=1, output=1)
    few, many = (decode_bounds(arch, CLUSTER, serving, one, batch)["memory"] for batch in (1, 1024))
    rate = CLUSTER.device.memory_bandwidth * CLUSTER.device.memory_efficiency
    total, active = count_parameters("mixtral-8x7b")
    assert few == pytest.approx(one.weights * active / total / rate, rel=0.01)
    assert many > one.weights / rate


def test_tensor_parallelism_shortens_the_first_token_and_replicas_raise_the_rate() -> None:
    """Small models: one rank per replica gives most tokens/s, eight ranks the shortest latency."""
    layouts = interlace.plan(
        "llama-3.2-1b", cluster=CLUSTER, gpus=8, serving=replace(SERVING, concurrency=512)
    )
    split = {layout.tp: estimate(layout) for layout in layouts if layout.pp == 1}
    assert layouts[0].tp == 1 and layouts[0].dp == 8
    assert split[8].first_token < split[2].first_token < split[1].first_token
    assert [one.tokens_per_second for one in layouts] == sorted(
        (one.tokens_per_second for one in layouts), reverse=True
    )
    assert "tokens/s" in layouts[1].lost


def test_requests_beyond_what_fits_queue_and_are_named() -> None:
    """The batch is what the cache holds."""
    layouts = interlace.plan(
        "llama-3.1-8b", cluster=CLUSTER, gpus=1, serving=Serving(concurrency=4000, prompt=8192, output=512)
    )
    one = estimate(layouts[0])
    assert one.concurrency == one.max_concurrency < 4000
    assert "4000 requests asked" in layouts[0].notes[0]
    assert layouts[0].fits


def test_a_model_too_large_names_the_smallest_replica() -> None:
    """The named split must fit when it is given the GPUs."""
    with pytest.raises(DoesNotFit, match="smallest that fits is 16 GPUs: tp8 pp2"):
        interlace.plan("llama-3.1-405b", cluster=CLUSTER, gpus=8, serving=SERVING)
    layouts = interlace.plan("llama-3.1-405b", cluster=CLUSTER, gpus=16, serving=SERVING)
    assert (8, 2) in {(one.tp, one.pp) for one in layouts}
