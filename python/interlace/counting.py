"""Counts the ops of this package that run, with the volume that they move: what a layer costs in collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .groups import resolve

__all__ = ["OpCounts", "count_ops"]

# Part of a ring's full turn that an op's collective takes: an all-reduce is a reduce-scatter and an all-gather.
_TURNS = {
    "all_gather": 1,
    "reduce_scatter": 1,
    "all_reduce": 2,
    "all_to_all": 1,
    "all_gather_gemm": 1,
    "gemm_reduce_scatter": 1,
    "gemm_all_reduce": 2,
    "sum_gemm_reduce_scatter": 1,
    "sum_gemm_all_reduce": 2,
    "gemm_all_reduce_norm": 2,
    "gemm_reduce_scatter_norm": 1,
    "all_gather_gemm_scaled": 1,
    "gemm_reduce_scatter_scaled": 1,
    "context_attention": 1,
    "context_attention_backward": 2,
    "gemm_all_to_all": 1,
    "all_to_all_gemm": 1,
    "exchange_features": 1,
}


@dataclass
class OpCounts:
    """Calls of collective ops by name, apart for forward and backward, and the bytes that they move.

    A volume is in bytes of the whole tensor per turn: moving S bytes with all_reduce counts 2 S, with all_gather or
    reduce_scatter S. Times (ranks - 1) / ranks it is what a rank sends with a bandwidth-optimal algorithm.
    """

    forward: Counter[str] = field(default_factory=Counter)
    backward: Counter[str] = field(default_factory=Counter)
    forward_bytes: int = 0
    backward_bytes: int = 0

    @property
    def by_name(self) -> Counter[str]:
        """Calls of both directions together."""
        return self.forward + self.backward

    @property
    def total(self) -> int:
        """All calls."""
        return self.by_name.total()

    def __str__(self) -> str:
        lines = [f"{'op':<26}{'forward':>8}{'backward':>9}"]
        for name in sorted(self.by_name):
            lines.append(f"{name:<26}{self.forward[name]:>8}{self.backward[name]:>9}")
        lines.append(f"{'bytes':<26}{self.forward_bytes:>8}{self.backward_bytes:>9}")
        return "\n".join(lines)


class _Counting(TorchDispatchMode):
    def __init__(self, counts: OpCounts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "interlace":
            name = func._opname.removesuffix("_reference").removesuffix("_decomposed")
            if name in _TURNS and args[-1] != "":  # an empty group name: attention that stays on its rank
                self._add(name, args, out)
        return out

    def _add(self, name: str, args: tuple[Any, ...], out: Any) -> None:
        moved = _TURNS[name] * _whole_bytes(name, args, out)
        if torch._C._current_graph_task_id() == -1:
            self.counts.forward[name] += 1
            self.counts.forward_bytes += moved
        else:
            self.counts.backward[name] += 1
            self.counts.backward_bytes += moved


def _whole_bytes(name: str, args: tuple[Any, ...], out: Any) -> int:
    """Bytes of the tensor that the collective puts together or takes apart."""
    if name == "all_gather_gemm":
        x, outs = args[0], out[1]
        rows = outs[0].numel() // max(1, outs[0].shape[-1])
        return rows * x.shape[-1] * x.element_size()
    if name == "all_gather_gemm_scaled":
        rows = out[0].numel() // max(1, out[0].shape[-1])
        return rows * args[0].shape[-1] * args[0].element_size()
    if name.endswith("_norm"):
        out = out[1]  # the sums
    if name.endswith(("gemm_reduce_scatter", "gemm_reduce_scatter_norm", "gemm_reduce_scatter_scaled")):
        x = args[0][0] if isinstance(args[0], list | tuple) else args[0]
        return x.numel() // max(1, x.shape[-1]) * out.shape[-1] * out.element_size()
    if name.startswith("context_attention"):  # every rank's keys and values, and their gradients
        k: Tensor = args[1] if name == "context_attention" else args[2]
        return 2 * k.nbytes * resolve(args[-1]).world_size
    if name in ("gemm_all_to_all", "exchange_features"):
        return sum(part.nbytes for part in (out if name == "gemm_all_to_all" else args[0]))
    whole: Tensor = args[0] if name in ("reduce_scatter", "all_to_all_gemm") else out
    return whole.nbytes


@contextmanager
def count_ops() -> Iterator[OpCounts]:
    """Count the collectives of this package that run inside, on this rank: `with count_ops() as counts: ..`.

    Ops that communicate nothing (column_gemm, packing) do not count. An op counts as backward when the autograd
    engine runs it; recomputation under activation checkpointing does. Not for timing: every op of torch inside goes
    through Python.
    """
    counts = OpCounts()
    with _Counting(counts):
        yield counts
