"""The two exceptions a collective can raise beyond bad arguments; both are RuntimeError."""

from __future__ import annotations

__all__ = ["CollectiveAborted", "CollectiveTimeout"]


class CollectiveTimeout(RuntimeError):
    """A peer did not reach a chunk before the deadline; the text names op, group, rank, peer, chunk, epochs."""


class CollectiveAborted(RuntimeError):
    """A peer refused, failed, died or made a different call; the text says which one and why."""
