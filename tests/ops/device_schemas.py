"""The ops of the CUDA library without the library: schemas read from its source, calls recorded instead of launched."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import interlace
from interlace import cuda_dispatch, heuristics
from interlace.cuda_dispatch import launches, state
from interlace.hardware import KNOWN

HOST = Path(__file__).parents[2] / "csrc" / "cuda" / "host"
NAMESPACE = "interlace_recorded"
SIZE = 4096  # what every half is said to need, bytes
_TOKEN = re.compile(r'"((?:[^"\\\\]|\\\\.)*)"|(INTERLACE_\w+)')


def schemas() -> dict[str, str]:
    """Name -> schema of every `_device_*` op; the macros that its source builds them of are expanded."""
    text = "\n".join(path.read_text() for path in sorted(HOST.glob("*.*")))
    macros = dict(re.findall(r"#define (INTERLACE_\w+)[ \t\\\n]+((?:.*\\\n)*.*)", text))

    def expanded(code: str) -> str:
        return "".join(m[1] or expanded(macros.get(m[2] or "", "")) for m in _TOKEN.finditer(code))

    found = [expanded(code) for code in re.findall(r"m\.def\((.*?)\);", text, re.DOTALL)]
    return {schema.split("(")[0]: schema for schema in found if schema.startswith("_device_")}


class Recorder:
    """Stands where `torch.ops.interlace` is asked for `_device_*`. Calls go through the dispatcher by schema."""

    _library: torch.library.Library | None = None
    _calls: list[tuple[str, tuple[Any, ...]]] = []  # noqa: RUF012 (one list for the kernels of the one library)

    def __init__(self) -> None:
        self.calls = Recorder._calls
        self.calls.clear()
        if Recorder._library is None:
            Recorder._library = torch.library.Library(NAMESPACE, "DEF")
            for name, schema in schemas().items():
                Recorder._library.define(schema)
                Recorder._library.impl(name, self._kernel(name), "CompositeExplicitAutograd")

    @staticmethod
    def _kernel(name: str) -> Callable[..., int | None]:
        def kernel(*args: Any) -> int | None:
            Recorder._calls.append((name, args))
            return SIZE if "half_bytes" in name else None

        return kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(torch.ops, NAMESPACE), name)

    def argument(self, name: str) -> list[Any]:
        """The value of the argument `name` in every launch that has it."""
        found = []
        for op, args in self.calls:
            schema = getattr(getattr(torch.ops, NAMESPACE), op).default._schema
            for position, argument in enumerate(schema.arguments):
                if argument.name == name and "half_bytes" not in op:
                    found.append(args[position] if position < len(args) else argument.default_value)
        return found

    @property
    def launched(self) -> list[str]:
        """Names of what was launched."""
        return [name.removeprefix("_device_") for name, _ in self.calls if "half_bytes" not in name]


class Memory:
    """Stands for `interlace.device`: a workspace of two ranks, of the size that the call asked for."""

    tail = ([128, 256], [64], 4096, SIZE, 0, 1.0)
    multicast = 4096

    @classmethod
    def workspace(cls, group_name: str, device: torch.device, half_bytes: int) -> type[Memory]:
        assert half_bytes == SIZE
        return cls


@contextmanager
def gpus(
    name: str, unavailable: str = "", *, warm: bool = True, captured: bool = False, rank_order: bool = False
) -> Iterator[Recorder]:
    """The group `name` as one of H200s. warm: it has agreed on what it is; captured: a CUDA graph is being captured.

    rank_order: it has agreed on sums in rank order.
    """
    recorder = Recorder()
    saved = launches._kernels, launches.device, torch.cuda.is_current_stream_capturing
    launches._kernels, launches.device = lambda: recorder, Memory  # type: ignore[assignment]
    torch.cuda.is_current_stream_capturing = lambda: captured
    interlace.resolve(name)
    if warm:
        hardware = KNOWN["NVIDIA H200"]
        state._states[name] = cuda_dispatch.GroupState(hardware, unavailable, heuristics.load(), rank_order)
    try:
        yield recorder
    finally:
        state._states.pop(name, None)
        launches._kernels, launches.device, torch.cuda.is_current_stream_capturing = saved
