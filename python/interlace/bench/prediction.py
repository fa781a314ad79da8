"""What the planner says of a decoder on this machine, from a profile that it measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ..planner import Layout, Serving, Training, plan, read_architecture
from ..planner.architecture import Architecture
from ..planner.hardware import Cluster
from ..planner.measure import measure
from ..planner.step import StepModel
from .cores import whole_machine
from .decoders import Sizes, config_of
from .session import Session

__all__ = ["Prediction", "predictions"]

DTYPES = {"float32": "fp32", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Prediction:
    """The planner's times of one model split over `ranks` processes of this machine, in one dtype."""

    architecture: Architecture
    cluster: Cluster
    ranks: int
    dtype: str

    def seconds(self, phase: str, tokens: int) -> float:
        """Of a prompt ("prefill"), or of forward and backward without the optimizer ("train")."""
        dtype = DTYPES[self.dtype]
        if phase == "prefill":
            serving = Serving(concurrency=1, prompt=tokens, output=1, dtype=dtype, kv_dtype=dtype)
            found = plan(
                self.architecture, cluster=self.cluster, gpus=self.ranks, serving=serving, headroom=0.0
            )
            layout = next(each for each in found if each.tp == self.ranks)
            assert layout.serving is not None
            return layout.serving.first_token
        training = Training(1, tokens, dtype, sequence_parallel=False)
        split = Layout(dp=1, tp=self.ranks, pp=1, cp=1, zero=0, sequence_parallel=False)
        step = StepModel(self.architecture, self.cluster, training).timed(split).step
        assert step is not None
        return step.total - step.optimizer


def predictions(
    session: Session, sizes: Sizes, worlds: Sequence[int], dtypes: Sequence[str]
) -> dict[tuple[int, str], Prediction]:
    """By (ranks, dtype). Collective: rank 0 has every world measured, on the cores of all; the others wait."""
    held: list[Any] = [{}]
    if session.rank == 0:
        session.say(f"the planner measures this machine with {', '.join(map(str, worlds))} ranks at work")
        with whole_machine(session.placement):
            held = [{ranks: measure(ranks=ranks, quick=session.size != "full") for ranks in worlds}]
    dist.broadcast_object_list(held, 0)
    architecture = read_architecture(config_of(sizes).to_dict())
    return {
        (ranks, dtype): Prediction(architecture, cluster, ranks, dtype)
        for ranks, cluster in held[0].items()
        for dtype in dtypes
        if DTYPES[dtype] in cluster.device.peak
    }
