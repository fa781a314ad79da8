"""How much memory of tensors a call needs beyond what was there before, from the profiler's record of the allocator."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.profiler import ProfilerActivity, profile

__all__ = ["peak_bytes", "quiet"]


def peak_bytes(call: Callable[[], object]) -> int:
    """Largest sum of bytes that `call` has allocated on the CPU at one time. It runs twice, first to warm up."""
    call()
    with quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        result = call()
    del result
    moves = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for move in sorted(moves, key=lambda e: e.start_ns()):
        held += move.nbytes()
        peak = max(peak, held)
    return peak


@contextmanager
def quiet() -> Iterator[None]:
    """Without the profiler's own lines on standard error."""
    before = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(nowhere)
