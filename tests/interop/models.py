"""Small models and comparisons that the interop tests share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from interlace.modules.layout import layouts_of
from tests.parallelize.models import assert_near, make

__all__ = ["assert_parameters_near", "ids", "llama", "loss_of", "train"]


def llama(heads: int = 6, kv_heads: int = 3, **options: object) -> nn.Module:
    """A random Llama in fp64 and eval mode, the same on every rank."""
    return make("llama", heads, kv_heads, **options)


def ids(step: int = 0, batch: int = 2, length: int = 7) -> Tensor:
    """Tokens of a step, the same on every rank; 7 of them divide by no world size."""
    return torch.randint(1, 61, (batch, length), generator=torch.Generator().manual_seed(100 + step))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean loss of the next token."""
    return model(input_ids=tokens, labels=tokens).loss


def train(model: nn.Module, steps: int = 3, lr: float = 0.01, micro_batches: int = 1) -> list[float]:
    """Losses of a few AdamW steps; with micro batches gradients accumulate."""
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(micro_batches):
            loss = loss_of(model, ids(step * micro_batches + micro)) / micro_batches
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


def assert_parameters_near(what: str, split: nn.Module, whole: nn.Module, rank: int, *, grads: bool) -> int:
    """This rank's parts of all parameters (or gradients) equal the whole model's; returns how many were compared."""
    layouts = layouts_of(split)
    named = dict(split.named_parameters())
    assert set(named) == set(dict(whole.named_parameters())), f"{what}: names of parameters differ"
    compared = 0
    for name, param in whole.named_parameters():
        found, expected = (named[name].grad, param.grad) if grads else (named[name].data, param.data)
        assert (found is None) == (expected is None), f"{what}: {name} has a gradient in one model only"
        if expected is None:
            continue
        if name in layouts:
            expected = layouts[name].take(expected, rank)
        assert_near(f"{what}: {name}", found, expected)
        compared += 1
    assert compared, f"{what}: nothing was compared"
    return compared
