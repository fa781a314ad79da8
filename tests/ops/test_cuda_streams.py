"""Backward on CUDA: weight gradients beside collectives, by stand-ins that write down what is asked; the backend."""

from __future__ import annotations

import threading
import types
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import interlace
from interlace.functional import _side
from interlace.functional._autograd import goes_as_forward, remember_backend
from interlace.functional._side import Beside
from interlace.paths import chosen_backend

DEVICE = torch.device("cuda", 0)


class Stream:
    """Writes down what is asked of it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def record_event(self) -> str:
        event = f"event {len(self.log)} of {self.name}"
        self.log.append(f"{self.name} records {event}")
        return event

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


class Memory:
    """A CUDA tensor as far as Beside looks at it."""

    is_cuda, device = True, DEVICE

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def record_stream(self, stream: Stream) -> None:
        self.log.append(f"{self.name} is kept for {stream.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """torch.cuda with a caller's stream and a side stream that write into the list."""
    lines: list[str] = []
    current = Stream("caller", lines)

    @contextmanager
    def on(stream: Stream) -> Any:
        lines.append(f"on {stream.name}")
        yield
        lines.append("back")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side", lines))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(_side, "_streams", {})
    return lines


def test_the_weight_gradient_waits_for_its_inputs_only_on_cuda(log: list[str]) -> None:
    """Catches a side stream that starts too early, one that waits for the collective it should run under, a caller that
    reads too early, and memory that is used again while the other stream still touches it."""
    grad, x, result = (Memory(name, log) for name in ("grad", "x", "result"))
    with torch.no_grad():
        beside = Beside(grad)  # type: ignore[arg-type]
        log.append("product and collective of dX")

        def work() -> Any:
            log.append("product of dW")
            return result

        assert beside.run(work, [grad, x]) is result  # type: ignore[list-item]
    assert log == [
        "caller records event 0 of caller",
        "product and collective of dX",
        "side waits for event 0 of caller",
        "on side",
        "product of dW",
        "back",
        "grad is kept for side",
        "x is kept for side",
        "side records event 8 of side",
        "caller waits for event 8 of side",
        "result is kept for caller",
    ]


def test_streams_are_left_alone_where_there_are_none_or_gradients_are_recorded(log: list[str]) -> None:
    """Catches a stream on the CPU, in a traced graph, or under create_graph, where the product has a history."""
    with torch.no_grad():
        assert Beside(torch.ones(2)).run(lambda: torch.ones(3), []).shape == (3,)
    with torch.enable_grad():
        assert Beside(Memory("grad", log)).run(lambda: torch.ones(4), []).shape == (4,)  # type: ignore[arg-type]
    assert log == []


def test_a_backward_on_another_thread_goes_as_its_forward_on_cuda_tensors(log: list[str]) -> None:
    """Catches `interlace.backend("fused")` that holds for the forward alone, and one that leaks into the engine."""
    context = types.SimpleNamespace()
    with interlace.backend("decomposed"):
        remember_backend(context, Memory("x", log))  # type: ignore[arg-type]
    seen: list[str] = []
    backward = goes_as_forward(lambda ctx: seen.append(chosen_backend()))

    def engine() -> None:
        backward(context)
        seen.append(chosen_backend())
        backward(types.SimpleNamespace())  # of a CPU tensor: nothing was remembered

    thread = threading.Thread(target=engine)
    thread.start()
    thread.join()
    assert seen == ["decomposed", "auto", "auto"]
    remember_backend(on_cpu := types.SimpleNamespace(), torch.ones(1))
    assert not vars(on_cpu)
