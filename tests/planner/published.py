"""Published training runs: the sizes, the layout and what was measured. Sources stand at each table."""

from __future__ import annotations

from dataclasses import dataclass

from interlace.planner.architecture import Architecture, read_architecture
from interlace.planner.cluster import Cluster, read_cluster
from interlace.planner.layout import Layout
from interlace.planner.step import StepModel
from interlace.planner.workload import Training


@dataclass(frozen=True)
class Run:
    """One row of a table. value: seconds per step, tokens/s per GPU or TFLOP/s per GPU, as the table gives it.

    interleave 0: the table does not say; the fastest legal number of chunks is taken.
    """

    name: str
    model: Architecture
    gpus: int
    batch: int
    seq: int
    value: float
    tp: int = 1
    pp: int = 1
    cp: int = 1
    interleave: int = 1
    microbatch: int = 1
    zero: int = 1
    recompute: str = "none"
    dtype: str = "bf16"
    sequence_parallel: bool = True
    flash: bool = True


def gpt(hidden: int, layers: int, heads: int, seq: int = 2048, vocab: int = 51200) -> Architecture:
    """A GPT with learned positions and a tied head, as Megatron's tables have them."""
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": seq, "vocab_size": vocab}
    return read_architecture({"model_type": "gpt2", **sizes})


def hardware(preset: str, *, fused: bool) -> Cluster:
    """The preset; fused=False: collectives of the forward wait, as the systems of these years did."""
    cluster = read_cluster(preset)
    return cluster if fused else cluster.with_device(slowdown=1.0)


def planned(run: Run, cluster: Cluster, microbatch: int = 0) -> Layout:
    """The run as the planner times it."""
    training = Training(
        global_batch=run.batch,
        seq=run.seq,
        dtype=run.dtype,
        sequence_parallel=run.sequence_parallel,
        flash=run.flash,
    )
    size = microbatch or run.microbatch
    dp = run.gpus // (run.tp * run.pp * run.cp)
    chunks = [run.interleave] if run.interleave else _chunks(run)
    model = StepModel(run.model, cluster, training)
    layouts = [
        Layout(
            dp=dp,
            tp=run.tp,
            pp=run.pp,
            cp=run.cp,
            interleave=count,
            zero=run.zero,
            microbatch=size,
            microbatches=run.batch // dp // size,
            recompute=run.recompute,
            schedule="interleaved" if count > 1 else "1f1b",
            sequence_parallel=run.sequence_parallel,
        )
        for count in chunks
    ]
    return min((model.timed(layout) for layout in layouts), key=lambda layout: layout.seconds)


def _chunks(run: Run) -> list[int]:
    if run.pp == 1:
        return [1]
    layers, counts = run.model.layers, range(1, 9)
    even = [count for count in counts if layers % (run.pp * count) == 0]
    return even or [count for count in counts if layers >= run.pp * count]


def tokens_per_gpu(run: Run, layout: Layout) -> float:
    """Tokens per second and GPU."""
    return run.batch * run.seq / layout.seconds / run.gpus


GPT_175B, GPT_530B, GPT_1T = gpt(12288, 96, 96), gpt(20480, 105, 128), gpt(25600, 128, 160)
_MODELS = {"22B": gpt(6144, 48, 64), "175B": GPT_175B, "530B": GPT_530B, "1T": GPT_1T}

# arXiv 2205.05198, tables 3 and 5: seconds per iteration on A100 80GB; full recomputation without, selective with
# sequence parallelism.
_RECOMPUTATION = (
    ("22B", 8, 4, 8, 1, 1, 4, 1.42, 1.10),
    ("175B", 64, 64, 8, 8, 3, 1, 18.13, 13.75),
    ("530B", 280, 280, 8, 35, 3, 1, 49.05, 37.83),
    ("1T", 512, 512, 8, 64, 1, 1, 94.42, 71.49),
)
ITERATIONS = [
    Run(
        f"{name} {mode}",
        _MODELS[name],
        gpus,
        batch,
        2048,
        seconds,
        tp=tp,
        pp=pp,
        interleave=chunks,
        microbatch=size,
        zero=0,
        recompute=mode,
        sequence_parallel=mode == "selective",
        flash=False,
    )
    for name, gpus, batch, tp, pp, chunks, size, full, selective in _RECOMPUTATION
    for mode, seconds in (("full", full), ("selective", selective))
]

# arXiv 2104.04473, table 1: TFLOP/s per A100, recomputation counted. Micro-batch and chunks are not in the table: one
# sequence where there is a pipeline, else the best of the powers of two; the best number of chunks.
WEAK_SCALING = [
    Run(
        f"{billions}B",
        gpt(hidden, layers, heads),
        gpus,
        batch,
        2048,
        rate,
        tp=tp,
        pp=pp,
        interleave=0,
        zero=0,
        recompute="full",
        sequence_parallel=False,
        flash=False,
    )
    for billions, hidden, layers, heads, tp, pp, gpus, batch, rate in (
        (1.7, 2304, 24, 24, 1, 1, 32, 512, 137),
        (3.6, 3072, 30, 32, 2, 1, 64, 512, 138),
        (7.5, 4096, 36, 32, 4, 1, 128, 512, 142),
        (18.4, 6144, 40, 48, 8, 1, 256, 1024, 135),
        (39.1, 8192, 48, 64, 8, 2, 512, 1536, 138),
        (76.1, 10240, 60, 80, 8, 4, 1024, 1792, 140),
        (145.6, 12288, 80, 96, 8, 8, 1536, 2304, 148),
        (310.1, 16384, 96, 128, 8, 16, 1920, 2160, 155),
        (529.6, 20480, 105, 128, 8, 35, 2520, 2520, 163),
        (1008.0, 25600, 128, 160, 8, 64, 3072, 3072, 163),
    )
]

# arXiv 2104.04473, table 2, the rows of tensor and pipeline parallelism: TFLOP/s per A100, plain 1F1B.
STRONG_SCALING = [
    Run(
        f"{name} on {gpus}",
        model,
        gpus,
        batch,
        2048,
        rate,
        tp=8,
        pp=pp,
        zero=0,
        recompute="full",
        sequence_parallel=False,
        flash=False,
    )
    for name, model, pp, gpus, batch, rate in (
        ("175B", GPT_175B, 12, 384, 1536, 153),
        ("175B", GPT_175B, 12, 768, 1536, 149),
        ("175B", GPT_175B, 12, 1536, 1536, 141),
        ("530B", GPT_530B, 35, 560, 2240, 171),
        ("530B", GPT_530B, 35, 1120, 2240, 167),
        ("530B", GPT_530B, 35, 2240, 2240, 159),
    )
]

_LLAMA = {
    size: read_architecture(f"llama-{size}")
    for size in ("2-7b", "2-13b", "2-70b", "3-8b", "3-70b", "3.1-405b")
}

# NeMo 24.07 performance summary (first nine) and Megatron Bridge 25.11 performance summary (last three): tokens/s per
# H100 SXM, FP8 products. The 405B run's chunks do not divide its layers; the fastest legal number is taken.
H100_FP8 = [
    Run(
        name,
        model,
        gpus,
        batch,
        seq,
        rate,
        tp=tp,
        pp=pp,
        cp=cp,
        interleave=v,
        microbatch=size,
        zero=zero,
        dtype="fp8",
    )
    for name, model, gpus, batch, size, seq, tp, pp, cp, v, zero, rate in (
        ("GPT 5B", gpt(4096, 24, 32), 64, 2048, 4, 2048, 1, 1, 1, 1, 1, 22521),
        ("GPT 20B", gpt(6144, 44, 48), 64, 256, 2, 2048, 2, 1, 1, 1, 1, 5851),
        ("GPT 175B on 128", GPT_175B, 128, 256, 1, 2048, 4, 8, 1, 6, 1, 726),
        ("GPT 175B on 512", GPT_175B, 512, 2048, 2, 2048, 4, 8, 1, 6, 1, 782),
        ("Llama 2 7B", _LLAMA["2-7b"], 8, 128, 1, 4096, 1, 1, 1, 1, 1, 16847),
        ("Llama 2 13B", _LLAMA["2-13b"], 16, 128, 1, 4096, 1, 4, 1, 10, 1, 8646),
        ("Llama 2 70B", _LLAMA["2-70b"], 64, 128, 1, 4096, 4, 4, 1, 20, 1, 1707),
        ("Llama 3 8B", _LLAMA["3-8b"], 8, 128, 1, 8192, 1, 1, 2, 1, 1, 12036),
        ("Llama 3 70B", _LLAMA["3-70b"], 64, 128, 1, 8192, 4, 4, 2, 5, 1, 1533),
        ("Llama 3 8B FSDP", _LLAMA["3-8b"], 8, 128, 1, 8192, 1, 1, 1, 1, 3, 14451),
        ("Llama 3 70B PP8", _LLAMA["3-70b"], 64, 128, 1, 8192, 4, 8, 1, 5, 1, 1602),
        ("Llama 3.1 405B", _LLAMA["3.1-405b"], 1024, 512, 1, 8192, 8, 8, 2, 0, 1, 292),
    )
]

# arXiv 2407.21783, table 4: TFLOP/s per H100, BF16, 16 M tokens per step; MFU 43, 41 and 38 %. The interleaved
# schedule's chunks are not in the table.
LLAMA_3 = [
    Run(name, _LLAMA["3.1-405b"], gpus, batch, seq, rate, tp=8, pp=16, cp=cp, interleave=0)
    for name, gpus, batch, seq, cp, rate in (
        ("405B on 8192", 8192, 2048, 8192, 1, 430),
        ("405B on 16384", 16384, 2048, 8192, 1, 400),
        ("405B at 131072", 16384, 128, 131072, 16, 380),
    )
]

# Megatron Bridge 25.11 performance summary: tokens/s per GPU, FP8 products (current scaling; last row MX).
B200_FP8 = [
    Run("Llama 3 8B", _LLAMA["3-8b"], 8, 128, 8192, 30624, microbatch=2, zero=0, dtype="fp8"),
    Run(
        "Llama 3.1 405B", _LLAMA["3.1-405b"], 128, 64, 8192, 661, tp=4, pp=8, cp=2, interleave=0, dtype="fp8"
    ),
]
GB200_FP8 = [
    Run("Llama 3 8B", _LLAMA["3-8b"], 8, 128, 8192, 31508, microbatch=2, zero=0, dtype="fp8"),
    Run("Llama 3 70B FSDP", _LLAMA["3-70b"], 64, 128, 8192, 4312, microbatch=2, zero=3, dtype="fp8"),
    Run("Llama 3 70B", _LLAMA["3-70b"], 64, 128, 8192, 3617, tp=2, pp=4, interleave=5, dtype="fp8"),
]

# torchtitan, Llama 3 on 64 A100 with FSDP and full recomputation: tokens/s per GPU.
TITAN_A100 = [Run("Llama 3 70B FSDP", _LLAMA["3-70b"], 64, 64, 8192, 331, zero=3, recompute="full")]
