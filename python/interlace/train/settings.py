"""What a run is: model, layout, data and length. Checked before any process starts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["DTYPES", "SCHEDULES", "Settings"]

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
SCHEDULES = ("1f1b", "gpipe", "interleaved")


@dataclass(frozen=True)
class Settings:
    """A run of dp x tp x pp ranks; crosses to the ranks as JSON.

    model: config.json, its folder or the name of a config the planner ships. text: a file whose bytes are the tokens
    ("" for random tokens). zero: 0 DDP, 1 DDP with a sharded optimizer, 2 and 3 fully_shard without and with
    resharding after the forward. microbatch: sequences of one rank and one pass. dtype: of weights, gradients,
    moments and activations. track: one more step under torch's MemTracker, for memory by category.
    Raises ValueError in one line naming the option, its value and what is expected.
    """

    model: str
    dp: int = 1
    tp: int = 1
    pp: int = 1
    interleave: int = 1
    zero: int = 0
    microbatch: int = 1
    global_batch: int = 8
    seq: int = 128
    steps: int = 5
    dtype: str = "fp32"
    recompute: str = "none"
    schedule: str = "1f1b"
    sequence_parallel: bool = True
    learning_rate: float = 1e-3
    seed: int = 0
    text: str = ""
    out: str = ""
    track: bool = True

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "interleave", "microbatch", "global_batch", "seq", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"train: {name}={getattr(self, name)}; expected at least 1")
        if self.zero not in (0, 1, 2, 3):
            raise ValueError(f"train: zero={self.zero}; expected 0, 1, 2 or 3")
        if self.dtype not in DTYPES:
            raise ValueError(f"train: dtype={self.dtype!r}; expected one of {', '.join(DTYPES)}")
        if self.recompute not in ("none", "full"):
            raise ValueError(
                f"train: recompute={self.recompute!r}; expected none or full (the attention used here keeps no scores,"
                " so there is nothing to select)"
            )
        if self.schedule not in SCHEDULES:
            raise ValueError(f"train: schedule={self.schedule!r}; expected one of {', '.join(SCHEDULES)}")
        if (self.interleave > 1) != (self.schedule == "interleaved"):
            raise ValueError(
                f"train: interleave={self.interleave} with schedule={self.schedule}; "
                "interleave above 1 and schedule=interleaved belong together"
            )
        if self.interleave > 1 and self.pp == 1:
            raise ValueError(f"train: interleave={self.interleave} needs pp of at least 2")
        if self.global_batch % (self.dp * self.microbatch):
            raise ValueError(
                f"train: global_batch={self.global_batch} is no multiple of dp x microbatch = "
                f"{self.dp} x {self.microbatch}"
            )
        if self.schedule == "interleaved" and self.microbatches % self.pp:
            raise ValueError(
                f"train: {self.microbatches} microbatches; the interleaved schedule needs a multiple of pp"
            )
        if self.pp > 1 and self.zero > 1:
            raise ValueError(
                f"train: zero={self.zero} with pp={self.pp}; pipelines run with zero 0 or 1 here"
            )

    @property
    def world_size(self) -> int:
        """dp x tp x pp."""
        return self.dp * self.tp * self.pp

    @property
    def microbatches(self) -> int:
        """Passes of one rank per step."""
        return self.global_batch // self.dp // self.microbatch

    def as_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return asdict(self)
