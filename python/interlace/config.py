"""Every environment variable the package reads, in one place and read once, at import.

| variable | meaning | default |
|---|---|---|
| INTERLACE_BACKEND | auto, fused, decomposed or reference: what `interlace.backend` starts with | auto |
| INTERLACE_TIMEOUT | seconds a rank waits for a peer before CollectiveTimeout | 300 |
| INTERLACE_WORKSPACE | first size of a group's workspace per rank, bytes | 8 MiB |
| INTERLACE_MAX_WORKSPACE | calls that need more than this per rank are cut into pieces, bytes | 64 MiB |
| INTERLACE_ISA | generic, avx2 or avx512: cap on the instruction set of the CPU kernels | best found |
| INTERLACE_TUNED | file of `interlace tune` laid over the shipped table of measured choices (CUDA) | none |
| INTERLACE_PRINT_CONFIG | 1 prints each new choice of algorithm once, with its reason | 0 |
"""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["Settings", "settings"]

BACKENDS = ("auto", "fused", "reference", "decomposed")
ISAS = ("", "generic", "avx2", "avx512")


@dataclass(frozen=True)
class Settings:
    """Values of the environment variables above. Sizes in bytes, times in seconds."""

    backend: str
    timeout: float
    workspace_bytes: int
    max_workspace_bytes: int
    isa: str
    print_config: bool
    tuned: str


def _number(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a number; unset it or give a number") from None
    if value <= 0:
        raise ValueError(f"{name}={text!r} must be positive; unset it or give a positive number")
    return value


def _choice(name: str, allowed: tuple[str, ...], default: str) -> str:
    value = os.environ.get(name, default).lower()
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(a or 'unset' for a in allowed)}")
    return value


def _read() -> Settings:
    return Settings(
        backend=_choice("INTERLACE_BACKEND", BACKENDS, "auto"),
        timeout=_number("INTERLACE_TIMEOUT", 300.0),
        workspace_bytes=int(_number("INTERLACE_WORKSPACE", 8 << 20)),
        max_workspace_bytes=int(_number("INTERLACE_MAX_WORKSPACE", 64 << 20)),
        isa=_choice("INTERLACE_ISA", ISAS, ""),
        print_config=os.environ.get("INTERLACE_PRINT_CONFIG", "0") not in ("", "0"),
        tuned=os.environ.get("INTERLACE_TUNED", ""),
    )


settings = _read()
