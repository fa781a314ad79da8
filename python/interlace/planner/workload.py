"""What is to be run: one training step, or one serving deployment."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DTYPE_BYTES", "OPTIMIZERS", "RECOMPUTES", "SCHEDULES", "Serving", "Training"]

DTYPE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0}
OPTIMIZERS = ("adamw", "adamw_bf16", "adamw_8bit", "sgd_momentum", "sgd")
RECOMPUTES = ("none", "selective", "full")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
ZERO_STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Training:
    """One optimizer step and how much of the layout is left open.

    global_batch: sequences per optimizer step over all ranks. seq: tokens per sequence. dtype: of weights and
    activations. recompute, schedule: "" lets the search choose, else one of RECOMPUTES, SCHEDULES. zero: None lets
    the search choose, else 0 to 3. tokens: of the whole run, for days and GPU-hours; 0 when not asked.
    fp32_gradients: gradients are accumulated in fp32 (4 bytes) whatever the dtype.
    sequence_parallel: norms and dropout are split over the tensor-parallel ranks (Korthikanti et al. 2205.05198).
    Raises ValueError naming the field, what came and what is expected.
    """

    global_batch: int
    seq: int
    dtype: str = "bf16"
    optimizer: str = "adamw"
    recompute: str = ""
    zero: int | None = None
    schedule: str = ""
    tokens: float = 0.0
    fp32_gradients: bool = False
    sequence_parallel: bool = True

    def __post_init__(self) -> None:
        _positive("Training", global_batch=self.global_batch, seq=self.seq)
        _one_of("Training", "dtype", self.dtype, tuple(DTYPE_BYTES))
        _one_of("Training", "optimizer", self.optimizer, OPTIMIZERS)
        _one_of("Training", "recompute", self.recompute, ("", *RECOMPUTES))
        _one_of("Training", "schedule", self.schedule, ("", *SCHEDULES))
        if self.zero is not None and self.zero not in ZERO_STAGES:
            raise ValueError(f"Training: zero={self.zero} is not a ZeRO stage; expected 0, 1, 2 or 3")
        if self.tokens < 0:
            raise ValueError(f"Training: tokens={self.tokens:g} is negative; expected the tokens of the run")

    @property
    def tokens_per_step(self) -> int:
        """global_batch x seq."""
        return self.global_batch * self.seq


@dataclass(frozen=True)
class Serving:
    """A steady stream of equal requests.

    concurrency: requests in flight over all replicas. prompt, output: tokens per request. dtype: of the weights and
    the products. kv_dtype: of the cache. Raises ValueError naming the field, what came and what is expected.
    """

    concurrency: int = 1
    prompt: int = 2048
    output: int = 256
    dtype: str = "bf16"
    kv_dtype: str = "bf16"

    def __post_init__(self) -> None:
        _positive("Serving", concurrency=self.concurrency, prompt=self.prompt, output=self.output)
        _one_of("Serving", "dtype", self.dtype, tuple(DTYPE_BYTES))
        _one_of("Serving", "kv_dtype", self.kv_dtype, tuple(DTYPE_BYTES))

    @property
    def context(self) -> int:
        """Tokens a request holds in the cache when it ends: prompt + output."""
        return self.prompt + self.output


def _positive(owner: str, **values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{owner}: {name}={value!r} is not a whole number")
        if value < 1:
            raise ValueError(f"{owner}: {name}={value} must be at least 1")


def _one_of(owner: str, name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        names = ", ".join(word for word in known if word)
        raise ValueError(f"{owner}: {name}={value!r} is unknown; expected one of {names}")
