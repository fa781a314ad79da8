"""Numbers as people read them."""

from __future__ import annotations

__all__ = ["count", "duration", "gigabytes", "rate"]


def gigabytes(size: float) -> str:
    """Bytes in decimal gigabytes: 12.3 GB; below 0.1 GB in megabytes, from 1000 GB in terabytes."""
    if abs(size) >= 1e12:
        return f"{size / 1e12:.2f} TB"
    return f"{size / 1e9:.1f} GB" if abs(size) >= 1e8 else f"{size / 1e6:.1f} MB"


def duration(seconds: float) -> str:
    """Seconds with three digits: 45 us, 12.3 ms, 1.23 s, 812 s."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    return (
        f"{seconds * 1e3:.3g} ms"
        if seconds < 1.0
        else f"{seconds:.{max(0, 2 - len(str(int(seconds))) + 1)}f} s"
    )


def count(number: float) -> str:
    """A large count: 8.03 B, 70.6 B, 405 B."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def rate(number: float) -> str:
    """A whole number with thousands apart: 1,234,567."""
    return f"{number:,.0f}"
