"""Products with the exchange of features for tokens, against the same products on one process, in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import interlace
import interlace.functional as il
from tests.distributed import run_distributed

Features = list[tuple[int, int]]


def near(what: str, ours: Tensor, exact: Tensor) -> None:
    if ours.shape != exact.shape or not torch.allclose(ours, exact, rtol=1e-12, atol=1e-12):
        raise AssertionError(f"{what} is off by {(ours - exact).abs().max():.2e}")


def summed(grad: Tensor) -> Tensor:
    """Over ranks, by torch: every rank has the share of its tokens."""
    total = grad.clone()
    dist.all_reduce(total)
    return total


def partition(total: int, size: int) -> Features:
    return [(total * r // size, total * (r + 1) // size) for r in range(size)]


def to_features(rank: int, size: int, backend: str) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    batch, tokens, k = 2, 5, 7
    x, first, second, bias = draw(batch, size * tokens, k), draw(12, k), draw(9, k), draw(12)
    overlapping = [(0, min(9, 3 + r)) for r in range(size)]
    features = [partition(12, size), overlapping]
    grads = [[draw(batch, size * tokens, e - b) for b, e in by_rank] for by_rank in features]
    whole = [t.clone().requires_grad_() for t in (x, first, second, bias)]
    exact = [whole[0] @ whole[1].t() + whole[3], whole[0] @ whole[2].t()]
    terms = [
        (y[..., b:e] * g).sum()
        for y, by_rank, gs in zip(exact, features, grads, strict=True)
        for (b, e), g in zip(by_rank, gs, strict=True)
    ]
    torch.stack(terms).sum().backward()
    mine = slice(rank * tokens, (rank + 1) * tokens)
    own = [x[:, mine].clone().requires_grad_(), *(t.clone().requires_grad_() for t in (first, second, bias))]
    with interlace.backend(backend):
        outs = il.linear_all_to_all(own[0], own[1:3], [own[3], None], features=features, group=None)
        torch.autograd.backward(outs, [grads[0][rank], grads[1][rank]])
    for i, (out, y) in enumerate(zip(outs, exact, strict=True)):
        near(f"out {i}", out, y[..., slice(*features[i][rank])])
    near("grad_x", own[0].grad, whole[0].grad[:, mine])
    for what, ours, unsplit in zip(("first", "second", "bias"), own[1:], whole[1:], strict=True):
        near(f"grad of {what}", summed(ours.grad), unsplit.grad)


def to_tokens(rank: int, size: int, backend: str) -> None:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    batch, tokens = 2, 5
    x, weight, bias, grad = (
        draw(batch, size * tokens, 12),
        draw(6, 12),
        draw(6),
        draw(batch, size * tokens, 6),
    )
    features = partition(12, size)
    whole = [t.clone().requires_grad_() for t in (x, weight, bias)]
    exact = whole[0] @ whole[1].t() + whole[2]
    exact.backward(grad)
    mine = slice(rank * tokens, (rank + 1) * tokens)
    own = [
        x[..., slice(*features[rank])].clone().requires_grad_(),
        *(t.clone().requires_grad_() for t in (weight, bias)),
    ]
    with interlace.backend(backend):
        out = il.all_to_all_linear(own[0], own[1], own[2], features=features, group=None)
        out.backward(grad[:, mine])
    near("out", out, exact[:, mine])
    near("grad_x", own[0].grad, whole[0].grad[..., slice(*features[rank])])
    near("grad_weight", summed(own[1].grad), whole[1].grad)
    near("grad_bias", summed(own[2].grad), whole[2].grad)


def every_mistake(rank: int, size: int) -> list[str]:
    """Of rank 1 alone, or of all: the text every rank raises with, and that the group works afterwards."""
    x, weight = torch.randn(1, 4, 8), torch.randn(6, 8)
    halves = [(0, 3), (3, 6)]
    calls = [
        lambda: il.linear_all_to_all(x[0], [weight], [None], features=[halves], group=None),
        lambda: il.linear_all_to_all(x, [weight[:, :7]], [None], features=[halves], group=None),
        lambda: il.linear_all_to_all(x, [weight], [None], features=[[(0, 3), (3, 7)]], group=None),
        lambda: il.linear_all_to_all(x[:, : 4 - rank], [weight], [None], features=[halves], group=None),
        lambda: il.all_to_all_linear(x[..., : 4 - rank], weight, features=[(0, 4), (5, 8)], group=None),
        lambda: il.all_to_all_linear(
            x[:, :3], weight, features=[(0, 8), (8, 8)][:: 1 - 2 * rank], group=None
        ),
    ]
    texts = []
    for call in calls:
        try:
            call()
            texts.append("nothing raised")
        except (ValueError, RuntimeError) as error:
            texts.append(str(error))
        out = il.all_reduce(torch.ones(3), group=None)
        if not bool((out == size).all()):
            raise AssertionError("the group is out of step")
    return texts


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_values_and_gradients(world_size: int) -> None:
    for backend in ("auto", "reference"):
        run_distributed(world_size, to_features, backend)
        run_distributed(world_size, to_tokens, backend)


def test_mistakes() -> None:
    for texts in run_distributed(2, every_mistake):
        for text, part in zip(
            texts,
            ("expected [B, tokens, K]", "needs a weight [N, 8]", "no slices of 6 rows", "ranks 0 and 1 differ",
             "no partition of the 8 columns", "all_to_all_linear: "),
            strict=True,
        ):  # fmt: skip
            assert part in text, texts
