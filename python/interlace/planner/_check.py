"""Checks of arguments that every formula shares."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["at_least", "dtype_bytes", "one_of", "positive"]

_BYTES = {
    "fp64": 8,
    "fp32": 4,
    "tf32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp8": 1,
    "int8": 1,
    "int4": 0.5,
    "fp4": 0.5,
}
_ALIASES = {
    "float64": "fp64",
    "float32": "fp32",
    "float": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float8": "fp8",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}


def at_least(op: str, minimum: int, **values: int) -> None:
    """Raise ValueError unless every value is an integer of at least `minimum`."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ValueError(f"{op}: {name}={value!r}; expected an integer >= {minimum}")


def positive(op: str, **values: float) -> None:
    """Raise ValueError unless every value is a number above 0."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ValueError(f"{op}: {name}={value!r}; expected a number above 0")


def one_of(op: str, name: str, value: object, allowed: Iterable[object]) -> None:
    """Raise ValueError unless value is among `allowed`."""
    options = tuple(allowed)
    if value not in options:
        raise ValueError(f"{op}: {name}={value!r}; expected one of {', '.join(map(str, options))}")


def dtype_bytes(op: str, dtype: object) -> float:
    """Bytes of one element of a dtype given as "bf16", "bfloat16" or torch.bfloat16."""
    name = str(dtype).removeprefix("torch.")
    name = _ALIASES.get(name, name)
    if name not in _BYTES:
        raise ValueError(f"{op}: dtype={dtype!r}; expected one of {', '.join(_BYTES)}")
    return _BYTES[name]
