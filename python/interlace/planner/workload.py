"""What is to be run: one training step, or one serving deployment."""

from __future__ import annotations

from dataclasses import dataclass

from ._check import at_least, one_of
from .memory import Precision
from .pipeline import SCHEDULES

__all__ = ["DTYPES", "OPTIMIZER_BYTES", "RECOMPUTES", "ZERO_STAGES", "Serving", "Training"]

DTYPES = ("bf16", "fp16", "fp32", "fp8")
RECOMPUTES = ("none", "selective", "full")
ZERO_STAGES = (0, 1, 2, 3)
# bytes per parameter of the moments alone; a master copy of 4 bytes is added where weights have fewer
OPTIMIZER_BYTES = {"adamw": 8.0, "adamw_8bit": 2.0, "sgd_momentum": 4.0, "sgd": 0.0}


@dataclass(frozen=True)
class Training:
    """One optimizer step and how much of the layout is left open.

    global_batch: sequences per optimizer step over all ranks. seq: tokens per sequence. dtype: of weights and
    activations. recompute, schedule: "" lets the search choose, else one of RECOMPUTES,
    SCHEDULES. zero: None lets
    the search choose, else 0 to 3. tokens: of the whole run, for days and GPU-hours; 0 when not asked.
    fp32_gradients: gradients are accumulated in fp32 (4 bytes) whatever the dtype.
    sequence_parallel: norms and dropout are split over the tensor-parallel ranks (Korthikanti et al. 2205.05198).
    flash: attention keeps no scores. dropout: masks are kept, one byte each.
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
    flash: bool = True
    dropout: bool = False

    def __post_init__(self) -> None:
        at_least("Training", 1, global_batch=self.global_batch, seq=self.seq)
        one_of("Training", "dtype", self.dtype, DTYPES)
        one_of("Training", "optimizer", self.optimizer, OPTIMIZER_BYTES)
        if self.recompute:
            one_of("Training", "recompute", self.recompute, RECOMPUTES)
        if self.schedule:
            one_of("Training", "schedule", self.schedule, SCHEDULES)
        if self.zero is not None:
            one_of("Training", "zero", self.zero, ZERO_STAGES)
        if not self.tokens >= 0:
            raise ValueError(f"Training: tokens={self.tokens:g} is negative; expected the tokens of the run")

    @property
    def precision(self) -> Precision:
        """Bytes per parameter and activation: dtype, fp32_gradients, the optimizer's moments and its fp32 copy.

        fp8 keeps parameters, gradients and activations in bf16 and only multiplies in fp8.
        """
        element = 4.0 if self.dtype == "fp32" else 2.0
        master = 0.0 if self.dtype == "fp32" else 4.0
        return Precision(
            parameters=element,
            gradients=4.0 if self.fp32_gradients else element,
            optimizer=OPTIMIZER_BYTES[self.optimizer] + master,
            activations=element,
        )

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
        at_least("Serving", 1, concurrency=self.concurrency, prompt=self.prompt, output=self.output)
        one_of("Serving", "dtype", self.dtype, DTYPES)
        one_of("Serving", "kv_dtype", self.kv_dtype, DTYPES)

    @property
    def context(self) -> int:
        """Tokens a request holds in the cache when it ends: prompt + output."""
        return self.prompt + self.output
