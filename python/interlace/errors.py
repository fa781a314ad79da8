"""The two exceptions a collective can raise beyond bad arguments; both are RuntimeError."""

from __future__ import annotations

from ._native import _C

__all__ = ["CollectiveAborted", "CollectiveTimeout", "translated"]


class CollectiveTimeout(RuntimeError):
    """A peer did not reach a chunk before the deadline; the text names op, group, rank, peer, chunk, epochs."""


class CollectiveAborted(RuntimeError):
    """A peer refused, failed, died or made a different call; the text says which one and why."""


_KINDS: tuple[type[Exception], ...] = (CollectiveTimeout, CollectiveAborted, ValueError, TypeError)


def translated(error: RuntimeError) -> Exception:
    """The exception for an op's RuntimeError: kernels can raise no other type, so its text begins with the class.

    Compiled graphs call the ops directly and raise the RuntimeError itself, with the same text.
    """
    text = str(error)
    if "CollectiveInterrupted: " in text:
        _C.raise_pending()  # KeyboardInterrupt, or what the user's signal handler raised
    # the first class named is this rank's; a relayed text may name the peer's class further on
    found = [(text.index(f"{kind.__name__}: "), kind) for kind in _KINDS if f"{kind.__name__}: " in text]
    if not found or type(error) is not RuntimeError:
        return error
    begin, kind = min(found, key=lambda pair: pair[0])
    return kind(text[begin + len(kind.__name__) + 2 :])
