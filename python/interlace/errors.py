"""The two exceptions a collective can raise beyond bad arguments; both are RuntimeError."""

from __future__ import annotations

from ._native import _C

__all__ = ["CollectiveAborted", "CollectiveTimeout", "translated"]


class CollectiveTimeout(RuntimeError):
    """A peer did not reach a chunk before the deadline; the text names op, group, rank, peer, chunk, epochs."""


class CollectiveAborted(RuntimeError):
    """A peer refused, failed, died or made a different call; the text says which one and why."""


def translated(error: RuntimeError) -> Exception:
    """The exception for an op's RuntimeError: kernels can raise no other type, so its text begins with the class.

    Compiled graphs call the ops directly and raise the RuntimeError itself, with the same text.
    """
    text = str(error)
    if "CollectiveInterrupted: " in text:
        _C.raise_pending()  # KeyboardInterrupt, or what the user's signal handler raised
    for kind in (CollectiveTimeout, CollectiveAborted):
        prefix = f"{kind.__name__}: "
        if prefix in text and not isinstance(error, kind):
            return kind(text[text.index(prefix) + len(prefix) :])
    return error
