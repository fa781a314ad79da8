"""Memory of a rank by category: states, activations, logits, workspaces and the KV cache. All in bytes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from math import ceil

from ._check import at_least, dtype_bytes, one_of
from .activations import ActivationShape, layer_activation_bytes
from .architecture import Architecture, Source, read_architecture
from .model import parameters, stage_parameters
from .pipeline import in_flight_microbatches, stage_layers

__all__ = [
    "MemoryBreakdown",
    "Precision",
    "activation_bytes_per_layer",
    "kv_cache_bytes_per_token",
    "logits_bytes",
    "stage_memory",
    "workspace_bytes",
    "zero_bytes",
]

RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Precision:
    """Bytes per parameter of each state, and per element of an activation.

    mixed: bf16 parameters and gradients, fp32 master copy and two Adam moments = 2 + 2 + 12 (arXiv 1910.02054).
    fp32 main gradients, as Megatron keeps, are gradients=4. Plain fp32 training is 4 + 4 + 8, activations=4.
    """

    parameters: float = 2
    gradients: float = 2
    optimizer: float = 12
    activations: float = 2


@dataclass(frozen=True)
class MemoryBreakdown:
    """Bytes of one rank at its peak, by category.

    temporary: gradients of activations, gathered parameters and other buffers that live inside one layer's pass.
    workspaces: staging of our fused collectives. reserved: context of device and libraries.
    """

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    temporary: float = 0.0
    workspaces: float = 0.0
    kv_cache: float = 0.0
    reserved: float = 0.0

    @property
    def total(self) -> float:
        """Sum of all categories, bytes."""
        return float(sum(getattr(self, item.name) for item in fields(self)))

    def as_dict(self) -> dict[str, float]:
        """Bytes by category name, without the total."""
        return {item.name: float(getattr(self, item.name)) for item in fields(self)}


def zero_bytes(params: float, world_size: int, stage: int, precision: Precision | None = None) -> float:
    """Bytes of parameters, gradients and optimizer states per rank under ZeRO `stage` 0 (DDP) to 3.

    With P parameters, N ranks and p, g, o bytes: 0: (p + g + o) P; 1: (p + g) P + o P / N; 2: p P + (g + o) P / N;
    3: (p + g + o) P / N. 70e9 parameters on 64 ranks: 1120, 293, 155, 17.5 GB. Source: arXiv 1910.02054, figure 1.
    """
    at_least("zero_bytes", 1, world_size=world_size)
    one_of("zero_bytes", "stage", stage, (0, 1, 2, 3))
    if not params >= 0:
        raise ValueError(f"zero_bytes: params={params!r}; expected a number >= 0")
    return sum(_states(params, world_size, stage, precision or Precision()))


def _states(params: float, world: int, stage: int, precision: Precision) -> tuple[float, float, float]:
    """(parameters, gradients, optimizer) bytes per rank."""
    divided = [world if stage >= least else 1 for least in (3, 2, 1)]
    each = (precision.parameters, precision.gradients, precision.optimizer)
    return tuple(params * size / parts for size, parts in zip(each, divided, strict=True))  # type: ignore[return-value]


def activation_bytes_per_layer(
    seq: int,
    batch: int,
    hidden: int,
    heads: int,
    tp: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> float:
    """Bytes of activations one GPT layer keeps for its backward, 16-bit values and 1-byte dropout masks.

    With s, b, h, a, t: none: s b h (10 + 24 / t + 5 a s / (h t)), with SP s b h / t (34 + 5 a s / h);
    selective drops 5 a s / h; full keeps 2 s b h (with SP too: the published table counts the input unsplit).
    Source: arXiv 2205.05198, table 2.
    """
    at_least("activation_bytes_per_layer", 1, seq=seq, batch=batch, hidden=hidden, heads=heads, tp=tp)
    one_of("activation_bytes_per_layer", "recompute", recompute, RECOMPUTE)
    values = seq * batch * hidden
    if recompute == "full":
        return 2.0 * values
    scores = 0.0 if recompute == "selective" else 5 * heads * seq / (hidden * tp)
    linear = 34 / tp if sequence_parallel else 10 + 24 / tp
    return values * (linear + scores)


def kv_cache_bytes_per_token(config: Source, dtype: object = "bf16", tp: int = 1) -> float:
    """Bytes one token adds to the KV cache, all layers, per rank.

    2 x layers x ceil(kv_heads / tp) x head_dim x bytes (kv heads are copied where tp exceeds them); latent attention
    keeps layers x (kv_rank + rope_dim) x bytes on every rank. Llama-3.1-70B in bf16: 327,680.
    Source: GQA arXiv 2305.13245; MLA arXiv 2405.04434, section 2.1.
    """
    at_least("kv_cache_bytes_per_token", 1, tp=tp)
    a, size = read_architecture(config), dtype_bytes("kv_cache_bytes_per_token", dtype)
    if a.latent:
        return a.layers * (a.latent.kv_rank + a.latent.rope_dim) * size
    return 2 * a.layers * ceil(a.kv_heads / tp) * a.head_dim * size


def logits_bytes(tokens: float, vocab: int, tp: int = 1, *, logits: float = 2, loss: float = 4) -> float:
    """Bytes of the logits and of what the loss keeps for its backward: tokens x vocab / tp x (logits + loss).

    loss: the fp32 softmax, 4 bytes.
    """
    at_least("logits_bytes", 1, tp=tp)
    return tokens * ceil(vocab / tp) * (logits + loss)


def workspace_bytes(tokens: float, hidden: int, tp: int, element: float = 2) -> float:
    """Bytes of symmetric memory the fused collectives of one group stage: 2 x tokens x hidden x element.

    Both parities of the largest message, from 8 MiB to 64 MiB (longer messages go in pieces); zero for tp = 1.
    Source: the defaults of INTERLACE_WORKSPACE and INTERLACE_MAX_WORKSPACE.
    """
    at_least("workspace_bytes", 1, tp=tp)
    return min(max(2.0 * tokens * hidden * element, 8 * 2**20), 64 * 2**20) if tp > 1 else 0.0


def stage_memory(
    architecture: Architecture,
    *,
    stage: int = 0,
    pp: int = 1,
    tp: int = 1,
    cp: int = 1,
    dp: int = 1,
    ep: int = 1,
    expert_tp: int = 1,
    zero: int = 0,
    seq: int,
    microbatch: int = 1,
    microbatches: int = 1,
    interleave: int = 1,
    schedule: str = "1f1b",
    recompute: str = "none",
    sequence_parallel: bool = False,
    precision: Precision | None = None,
    flash: bool = True,
    dropout: bool = False,
    eager: bool = False,
    gathered_logits: bool = False,
    workspaces: bool = True,
) -> MemoryBreakdown:
    """MemoryBreakdown of one rank of pipeline stage `stage`, bytes.

    Parameters by `model.stage_parameters`, states by ZeRO over DP x CP (experts over their own replicas), activations
    of the architecture's own layers x micro-batches in flight. flash, dropout, eager: see ActivationShape.
    gathered_logits: each rank of TP has all of them. Source: arXiv 1910.02054, arXiv 2205.05198.
    """
    at_least("stage_memory", 1, seq=seq, microbatch=microbatch, tp=tp, pp=pp, cp=cp, dp=dp, ep=ep)
    one_of("stage_memory", "zero", zero, (0, 1, 2, 3))
    one_of("stage_memory", "recompute", recompute, RECOMPUTE)
    precision = precision or Precision()
    held = _Held(architecture, stage, pp, interleave, tp, ep, expert_tp)
    states = _stage_states(held, dp * cp, max(1, dp * cp * tp // (ep * expert_tp)), zero, precision)
    element, split = precision.activations, sequence_parallel
    kept = ActivationShape(seq, microbatch, tp, cp, ep, expert_tp, split, element, flash, dropout, eager)
    vocab_ranks = 1 if gathered_logits else tp
    ends, logits, gradient = _last_stage(architecture, kept, vocab_ranks) if stage == pp - 1 else (0.0,) * 3
    # recomputation holds one layer in full; a backward holds the gradient of the widest value of a layer beside it
    whole = _held_activations(held, kept, "none")[1] if recompute == "full" else 0.0
    whole += 2 * kept.tokens * architecture.hidden * element
    if zero == 3:  # the layer at work and the one fetched ahead
        whole += 2 * _widest_layer(held) * element
    # the logits are gone when the backward reaches the layers
    temporary = max(gradient, whole - logits)
    if zero == 3:  # embedding and head stay gathered
        temporary += _root(held) * element
    flying = in_flight_microbatches(pp, microbatches, stage, interleave, schedule)
    return MemoryBreakdown(
        parameters=states[0],
        gradients=states[1],
        optimizer=states[2],
        activations=_held_activations(held, kept, recompute)[0] * flying + ends,
        logits=logits,
        temporary=temporary,
        workspaces=workspace_bytes(kept.tokens, architecture.hidden, tp, element) if workspaces else 0.0,
    )


def _stage_states(held: _Held, world: int, replicas: int, zero: int, precision: Precision) -> list[float]:
    """Bytes of parameters, gradients and optimizer: dense ones over `world` ranks, experts over their replicas."""
    dense, experts = _held_parameters(held)
    both = _states(dense, world, zero, precision), _states(experts, replicas, zero, precision)
    return [mine + routed for mine, routed in zip(*both, strict=True)]


def _last_stage(a: Architecture, shape: ActivationShape, vocab_ranks: int) -> tuple[float, float, float]:
    """Bytes of the last norm and the head's input, of the logits, and of the gradients of the loss.

    The last stage of 1F1B has one micro-batch in flight.
    """
    size, rms = shape.element, shape.eager and a.norm == "rms"
    ends = shape.tokens * a.hidden * size / (shape.tp if shape.sequence_parallel else 1)
    ends *= 3 if rms else 2  # unfused, the value between the norm's two halves stays
    if a.head not in ("lm", "mlm"):
        return ends, 0.0, 0.0
    logits = logits_bytes(shape.tokens, a.vocab, vocab_ranks, logits=size)
    # unfused, the gradients of softmax and logits stand side by side in fp32
    each = {"logits": 4.0, "loss": 4.0} if shape.eager else {"logits": size, "loss": 0.0}
    return ends, logits, logits_bytes(shape.tokens, a.vocab, vocab_ranks, **each)


@dataclass(frozen=True)
class _Held:
    """Which part of a model a rank holds."""

    architecture: Architecture
    stage: int
    pp: int
    interleave: int
    tp: int
    ep: int
    expert_tp: int

    def parameters(
        self, layers: tuple[int, ...], *, first: bool = False, last: bool = False
    ) -> tuple[float, float]:
        counted, a = _counted(self.architecture), self.architecture
        split = {"tp": self.tp, "ep": self.ep, "expert_tp": self.expert_tp}
        return stage_parameters(counted, a, layers, first=first, last=last, **split)

    @property
    def layers(self) -> tuple[int, ...]:
        return _split(self.architecture.layers, self.pp, self.interleave)[self.stage]


_counted = lru_cache(maxsize=64)(parameters)
_split = lru_cache(maxsize=4096)(stage_layers)


@lru_cache(maxsize=4096)
def _held_parameters(held: _Held) -> tuple[float, float]:
    """(dense, expert) parameters."""
    return held.parameters(held.layers, first=held.stage == 0, last=held.stage == held.pp - 1)


@lru_cache(maxsize=4096)
def _root(held: _Held) -> float:
    """Parameters of a rank outside its layers."""
    return sum(held.parameters((), first=held.stage == 0, last=held.stage == held.pp - 1))


@lru_cache(maxsize=4096)
def _widest_layer(held: _Held) -> float:
    """Parameters of the largest layer on one rank, gathered from the ZeRO-3 shards."""
    return max(sum(held.parameters((layer,))) for layer in held.layers)


@lru_cache(maxsize=4096)
def _held_activations(held: _Held, shape: ActivationShape, recompute: str) -> tuple[float, float]:
    """Bytes of one micro-batch in all layers of the stage, and in the largest of them."""
    a = held.architecture
    kinds = {a.is_moe_layer(layer): layer for layer in held.layers}
    sizes = {kind: layer_activation_bytes(a, layer, shape, recompute) for kind, layer in kinds.items()}
    each = [sizes[a.is_moe_layer(layer)] for layer in held.layers]
    widest = max(each)
    if shape.eager and not a.positions:  # the tables of the rotation, once for all layers
        each.append(2 * shape.seq / shape.cp * a.head_dim * shape.element)
    if held.stage == 0 and a.encoder:
        each += [
            layer_activation_bytes(a.encoder, layer, shape, recompute) for layer in range(a.encoder.layers)
        ]
    return sum(each), widest
