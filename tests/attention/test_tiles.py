"""Spans and tiles against masks written out in full. No processes."""

from __future__ import annotations

import itertools

import pytest
import torch

from interlace.context_parallel import work_of
from interlace.functional.attention import LAYOUTS, Problem, Span, spans_of
from interlace.functional.attention.tiles import Tile, tiles, visible_pairs
from tests.attention.reference import Case, held

MASKS = (
    Case(causal=False),
    Case(),
    Case(window=1),
    Case(window=5),
    Case(window=48),
    Case(window=300),
    Case(cu_seqlens=(0, 24, 48)),
    Case(cu_seqlens=(0, 0, 24, 48), causal=False),
    Case(cu_seqlens=(0, 24, 48), window=3),
)


def seen_by(tile: Tile) -> torch.Tensor:
    """What the kernels let through, [rows, columns]."""
    i, j = torch.arange(tile.rows).unsqueeze(1), torch.arange(tile.columns).unsqueeze(0)
    if tile.causal:
        return j <= i
    if tile.band is not None:
        return (j - i >= tile.band[0]) & (j - i <= tile.band[1])
    return torch.ones(tile.rows, tile.columns, dtype=torch.bool)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tiles_cover_the_mask_once(layout: str, world_size: int) -> None:
    for case in MASKS:
        work = work_of(
            layout,
            case.tokens,
            world_size,
            causal=case.causal,
            window=case.window,
            cu_seqlens=case.cu_seqlens,
        )
        mask = case.mask()
        for rank in range(world_size):
            mine = held(layout, case, world_size, rank)
            for peer in range(world_size):
                theirs = held(layout, case, world_size, peer)
                count = torch.zeros(len(mine), len(theirs), dtype=torch.int64)
                problem = Problem.of_layout(
                    layout, case.tokens, world_size, causal=case.causal, window=case.window,
                    cu_seqlens=case.cu_seqlens,
                )  # fmt: skip
                for tile in problem.tiles(rank, peer):
                    seen = seen_by(tile)
                    assert seen.any(1).all(), f"{case} {layout}: {tile} has a query that sees nothing"
                    assert not tile.causal or tile.rows == tile.columns, f"{tile} is causal and not square"
                    rows = slice(tile.row, tile.row + tile.rows)
                    count[rows, tile.column : tile.column + tile.columns] += seen
                assert torch.equal(count, mask[mine][:, theirs].long()), f"{case} {layout} {rank} of {peer}"
            assert work.pairs[rank] == int(mask[mine].sum())


def test_every_token_is_held_once() -> None:
    for layout, world_size, documents in itertools.product(LAYOUTS, (1, 2, 3, 4), (None, (0, 24, 48))):
        case = Case(cu_seqlens=documents)
        everyone = torch.cat([held(layout, case, world_size, rank) for rank in range(world_size)])
        assert torch.equal(everyone.sort().values, torch.arange(48))


def test_odd_pairs_of_spans() -> None:
    """Spans that no layout makes: other lengths, any distance."""
    for start, length, step, window in itertools.product((0, 3, 7, 20), (1, 2, 5, 9), (1, 3), (None, 1, 4)):
        query, key = Span(0, start, length, step), Span(0, 6, 4, step)
        i = torch.arange(start, start + length * step, step).unsqueeze(1)
        j = torch.arange(6, 6 + 4 * step, step).unsqueeze(0)
        mask = (j <= i) if window is None else (j <= i) & (j > i - window)
        count = torch.zeros(mask.shape, dtype=torch.int64)
        for tile in tiles([query], [key], True, window):
            rows = slice(tile.row, tile.row + tile.rows)
            count[rows, tile.column : tile.column + tile.columns] += seen_by(tile)
        assert torch.equal(count, mask.long()), (query, key, window)
        assert visible_pairs([query], [key], True, window) == int(mask.sum())


def test_balance() -> None:
    assert work_of("zigzag", 4096, 2).imbalance == 1.0
    assert work_of("striped", 4096, 4).imbalance < 1.001
    assert work_of("contiguous", 4096, 2).imbalance == pytest.approx(1.5, abs=1e-3)
    assert work_of("contiguous", 4096, 2).tokens_read == (0, 2048), "rank 0 sees nothing of rank 1"
    documents = (0, 512, 768, 4096)
    assert work_of("zigzag", 4096, 4, cu_seqlens=documents).imbalance == 1.0
    assert work_of("contiguous", 4096, 4, cu_seqlens=documents).imbalance > 1.5
    two_kv_heads = work_of("zigzag", 4096, 2).kv_bytes(kv_heads=2, head_dim=64, element_size=2)
    assert two_kv_heads == 2 * 2048 * 2 * 2 * 64 * 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("zigzag", 50, 4, 0), "needs a multiple of 8 tokens, the sequence has 50; pad it by 6"),
        (("contiguous", 50, 4, 0), "multiple of 4 tokens"),
        (("spiral", 48, 4, 0), "expected one of contiguous, zigzag, striped"),
        (("zigzag", 48, 2, 0, (0, 10, 48)), r"the document at \[0, 10\) has 10; pad it by 2"),
        (("zigzag", 48, 2, 0, (0, 40)), "does not describe 48 tokens"),
        (("zigzag", 48, 2, 0, (0, 40, 32, 48)), "never decreasing"),
    ],
)
def test_lengths_that_do_not_fit(arguments: tuple, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        spans_of(*arguments)
