"""Which parts of the attention matrix must be computed for two spans of tokens: causal triangles, full rectangles, and
bands that need a mask. Parts that a mask hides are left out. Plain numbers, no tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .spans import Span

__all__ = ["Tile", "tiles", "visible_pairs"]

_BAND_ROWS = 256  # queries of one masked tile: keeps the mask small and the hidden corners thin


@dataclass(frozen=True)
class Tile:
    """Queries [row, row + rows) against keys [column, column + columns), as tokens of the two tensors.

    causal: query i sees keys 0..i of the tile, which is square. band: query i sees key j when low <= j - i <= high,
    by a mask.
    Every query of a tile sees at least one key.
    """

    row: int
    rows: int
    column: int
    columns: int
    causal: bool = False
    band: tuple[int, int] | None = None


def tiles(queries: Sequence[Span], keys: Sequence[Span], causal: bool, window: int | None) -> list[Tile]:
    """All tiles that `queries` need of `keys`, full rectangles that lie side by side as one."""
    found: list[Tile] = []
    for query in queries:
        for key in keys:
            if query.document == key.document:
                for tile in _pair(query, key, causal, window):
                    last = found[-1] if found else None
                    if last is not None and _full(last) and _full(tile) and _beside(last, tile):
                        found[-1] = Tile(tile.row, tile.rows, last.column, last.columns + tile.columns)
                    else:
                        found.append(tile)
    return found


def visible_pairs(queries: Sequence[Span], keys: Sequence[Span], causal: bool, window: int | None) -> int:
    """Number of (query, key) pairs that the mask lets through: the work of a rank."""
    return sum(_count(tile) for tile in tiles(queries, keys, causal, window))


def _full(tile: Tile) -> bool:
    return not tile.causal and tile.band is None


def _beside(left: Tile, right: Tile) -> bool:
    return (left.row, left.rows, left.column + left.columns) == (right.row, right.rows, right.column)


def _count(tile: Tile) -> int:
    if tile.causal:
        return tile.rows * (tile.rows + 1) // 2
    if tile.band is not None:
        low, high = tile.band
        return sum(max(0, min(tile.columns - 1, i + high) - max(0, i + low) + 1) for i in range(tile.rows))
    return tile.rows * tile.columns


def _pair(query: Span, key: Span, causal: bool, window: int | None) -> Iterator[Tile]:
    """Key j is seen by query i when low <= j - i <= high, in units of the step that both spans share."""
    if not causal:
        yield Tile(query.offset, query.length, key.offset, key.length)
        return
    distance = query.start - key.start
    high = distance // query.step
    low = -(-(distance - (window - 1)) // query.step) if window is not None else -(query.length + key.length)
    first = max(0, -high)  # earlier queries see nothing
    last = min(query.length, key.length - low)  # later ones neither
    if first >= last or low > high:
        return
    if low <= 1 - last:  # the window hides nothing here
        yield from _triangle(query, key, first, last, high)
        return
    for begin in range(first, last, _BAND_ROWS):
        end = min(last, begin + _BAND_ROWS)
        left, right = max(0, low + begin), min(key.length, high + end)
        inner = (low + begin - left, high + begin - left)
        whole = inner[0] + end - begin - 1 <= 0 and inner[1] >= right - left - 1
        yield Tile(
            query.offset + begin, end - begin, key.offset + left, right - left, band=None if whole else inner
        )


def _triangle(query: Span, key: Span, first: int, last: int, high: int) -> Iterator[Tile]:
    """Queries [first, last): a rectangle of the keys that all of them see, and the triangle behind it."""
    row, rows = query.offset + first, last - first
    common = min(key.length, max(0, high + first))  # keys below this one are seen by every query
    rest = min(key.length - common, rows)
    if common == key.length:
        yield Tile(row, rows, key.offset, common)
        return
    if common + 1 == key.length:  # the first query sees the last key too
        yield Tile(row, rows, key.offset, key.length)
        return
    if common:
        yield Tile(row, rows, key.offset, common)
    yield Tile(
        row, rest, key.offset + common, rest, causal=True
    )  # square: kernels disagree about other causal shapes
    if rows > rest:
        yield Tile(row + rest, rows - rest, key.offset + common, rest)
