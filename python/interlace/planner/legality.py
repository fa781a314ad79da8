"""Which sizes of a mesh axis a model admits. Every rule answers with its reason, "" when the size is legal."""

from __future__ import annotations

from .architecture import Architecture
from .cluster import Cluster
from .workload import Serving, Training

__all__ = [
    "DoesNotFit",
    "context_reason",
    "expert_reason",
    "layout_reasons",
    "microbatch_reason",
    "pipeline_reason",
    "tensor_reason",
]

SHORT_CHUNKS = 3


class DoesNotFit(ValueError):
    """No layout of this many GPUs fits their memory; the text names the smallest that does."""


def tensor_reason(arch: Architecture, cluster: Cluster, tp: int, *, across_nodes: bool = False) -> str:
    """Why heads, key/value heads, MLP or vocabulary cannot be cut in tp parts, or the node is too small.

    kv_heads < tp is legal when tp % kv_heads == 0: each key/value head is then held by tp / kv_heads ranks. The
    vocabulary may be cut unevenly. across_nodes: a tensor-parallel group may span nodes.
    """
    if tp == 1:
        return ""
    if tp > cluster.devices_per_node > 1 and not across_nodes:
        return f"tp={tp} spans nodes of {cluster.devices_per_node} devices, and its collectives wait in every layer"
    if arch.heads % tp:
        return f"tp={tp} does not divide {arch.heads} heads"
    if arch.latent is None and arch.kv_heads % tp and tp % arch.kv_heads:
        return f"tp={tp} neither divides nor is a multiple of {arch.kv_heads} key/value heads"
    if (arch.moe is None or len(arch.moe.layers) < arch.layers) and arch.intermediate % tp:
        return f"tp={tp} does not divide the MLP width {arch.intermediate}"
    if 0 < arch.vocab < tp:
        return f"tp={tp} is more than the {arch.vocab} rows of the vocabulary"
    return ""


def context_reason(arch: Architecture, seq: int, cp: int, tp: int, *, sequence_parallel: bool = True) -> str:
    """Why a sequence of seq tokens cannot be cut over cp x tp ranks.

    A causal sequence is cut in 2 cp chunks and each rank takes one from either end, so that all have equal work.
    """
    if cp > 1 and seq % (2 * cp):
        return (
            f"cp={cp}: {seq} tokens do not divide by 2 x cp = {2 * cp} (one chunk from either end per rank)"
        )
    if sequence_parallel and tp > 1 and (seq // cp) % tp:
        return f"tp={tp}: {seq // cp} tokens per context rank do not divide over tp for sequence parallelism"
    if cp > 1 and arch.encoder is not None:
        return f"cp={cp}: context parallelism of an encoder-decoder model is not planned"
    return ""


def pipeline_reason(arch: Architecture, pp: int, interleave: int) -> str:
    """Why the layers do not divide into pp stages of `interleave` chunks each.

    Up to SHORT_CHUNKS chunks may be a layer shorter, as for the 126 layers of Llama 3 405B over 16 stages
    (arXiv 2407.21783, section 3.3.2): the ends carry embedding and head.
    """
    chunks = pp * interleave
    if interleave > 1 and pp == 1:
        return f"interleave={interleave} needs more than one stage"
    if chunks > 1 and arch.encoder is not None:
        return f"pp={pp}: a pipeline through an encoder-decoder model is not planned"
    if arch.layers < chunks or -arch.layers % chunks > SHORT_CHUNKS:
        return (
            f"{arch.layers} layers do not divide into pp x interleave = {pp} x {interleave} = {chunks} chunks"
        )
    return ""


def expert_reason(arch: Architecture, ep: int, ranks: int) -> str:
    """Why experts cannot be spread over ep of `ranks` = dp x cp x tp ranks."""
    if ep == 1:
        return ""
    if arch.moe is None:
        return f"ep={ep}: the model has no experts"
    if arch.moe.experts % ep:
        return f"ep={ep} does not divide {arch.moe.experts} experts"
    if ranks % ep:
        return f"ep={ep} does not divide dp x cp x tp = {ranks}"
    return ""


def microbatch_reason(training: Training, dp: int, pp: int, interleave: int, microbatch: int) -> str:
    """Why the global batch does not divide over dp replicas in passes of microbatch sequences."""
    step = dp * microbatch
    if training.global_batch % step:
        return f"global batch {training.global_batch} does not divide by dp x microbatch = {dp} x {microbatch} = {step}"
    passes = training.global_batch // step
    if interleave > 1 and passes % pp:
        return f"interleaving needs microbatches ({passes}) in multiples of pp={pp}"
    return ""


def layout_reasons(
    arch: Architecture,
    cluster: Cluster,
    workload: Training | Serving,
    *,
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    interleave: int = 1,
    microbatch: int = 1,
) -> list[str]:
    """Every reason why a layout is illegal for a model, a cluster and a workload; empty when it is legal.

    All sizes are counts of ranks (dp, tp, pp, cp, ep), chunks per stage (interleave) or sequences (microbatch).
    """
    found = [
        tensor_reason(arch, cluster, tp),
        pipeline_reason(arch, pp, interleave),
        expert_reason(arch, ep, dp * cp * tp),
    ]
    if isinstance(workload, Training):
        found += [
            context_reason(arch, workload.seq, cp, tp, sequence_parallel=workload.sequence_parallel),
            microbatch_reason(workload, dp, pp, interleave, microbatch),
        ]
    elif cp > 1:
        found.append(f"cp={cp}: serving is planned without context parallelism")
    return [reason for reason in found if reason]
