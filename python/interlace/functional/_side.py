"""Weight gradients beside collectives: on CUDA their product runs on a second stream while the first communicates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Beside"]

_streams: dict[int, Any] = {}  # one side stream a device, made when first needed


class Beside:
    """Work that needs nothing of what comes after this point, to run under it.

        beside = Beside(grad_out)            # from here on
        grad_x = ...                         # a product and its collective, on the caller's stream
        grad_weight = beside.run(lambda: weight_gradient(grad_out, x), [grad_out, x])

    On the CPU, under torch.compile and with fake tensors `run` just runs. The caller's stream waits for the result, so
    its reader need not know; memory that both streams touch is kept from reuse until both are done with it.
    """

    def __init__(self, like: Tensor) -> None:
        self._device = like.device if _has_streams(like) else None
        self._ready: Any = None
        if self._device is not None:
            self._ready = torch.cuda.current_stream(self._device).record_event()

    def run(self, work: Callable[[], Tensor], reads: Sequence[Tensor]) -> Tensor:
        """The result of `work`, which reads tensors that were complete when this object was made."""
        if self._device is None:
            return work()
        current = torch.cuda.current_stream(self._device)
        side = _side_stream(self._device)
        side.wait_event(self._ready)
        with torch.cuda.stream(side):
            result = work()
        for tensor in reads:
            tensor.record_stream(side)
        current.wait_event(side.record_event())
        result.record_stream(current)
        return result


def _has_streams(like: Tensor) -> bool:
    """Real CUDA memory, and no tracer that would record streams."""
    if not like.is_cuda or torch.compiler.is_compiling():
        return False
    return not torch._subclasses.fake_tensor.is_fake(like) and not torch.is_grad_enabled()


def _side_stream(device: torch.device) -> Any:
    index = torch.cuda.current_device() if device.index is None else device.index
    stream = _streams.get(index)
    if stream is None:
        stream = _streams[index] = torch.cuda.Stream(device=index)
    return stream
