"""Batches dealt out over ranks: every token once, labels of the next token across borders, and the way back."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from interlace.context_parallel import global_mean, shard_batch
from interlace.functional.attention import LAYOUTS
from tests.distributed import run_distributed

IGNORE = -100


def token_pairs(inputs: dict[str, Tensor]) -> list[tuple[int, int, int]]:
    """(position, token, label of the next token) of every place that has a label."""
    ids, labels, positions = inputs["input_ids"][0], inputs["shift_labels"][0], inputs["position_ids"][0]
    return [
        (int(p), int(t), int(n)) for p, t, n in zip(positions, ids, labels, strict=True) if int(n) != IGNORE
    ]


def dealt_out(rank: int, world_size: int) -> list:
    everything = []
    for layout in LAYOUTS:
        for length, documents in ((48, None), (37, None), (1, None), (37, (0, 10, 11, 37))):
            ids = torch.arange(100, 100 + length).unsqueeze(0)
            batch = {"input_ids": ids, "labels": ids.clone(), "mask_of_mine": torch.ones(1, length, 3)}
            shards = shard_batch(batch, None, layout, buffers={"mask_of_mine": 1}, cu_seqlens=documents)
            sizes = {name: t.shape[1] for name, t in shards.inputs.items() if t.dim() > 1}
            if len(set(sizes.values())) != 1:
                raise AssertionError(f"lengths differ: {sizes}")
            back = shards.unshard(shards.inputs["input_ids"].unsqueeze(-1).float())
            if not torch.equal(back[..., 0].long(), ids):
                raise AssertionError(f"{layout}, {length}, {documents}: unshard gives {back[..., 0]}")
            leaf = shards.inputs["input_ids"].float().requires_grad_()
            whole = shards.unshard(leaf)
            whole.backward(torch.arange(length).float().unsqueeze(0) / world_size)
            expected = shards.shard(torch.arange(length).float().unsqueeze(0))
            if not torch.allclose(leaf.grad, expected):
                raise AssertionError(f"{layout}, {length}, {documents}: gradient of unshard")
            everything.append((token_pairs(shards.inputs), float(shards.inputs["num_items_in_batch"])))
    return everything


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_token_and_its_label(world_size: int) -> None:
    results = run_distributed(world_size, dealt_out)
    cases = [(n, d) for _ in LAYOUTS for n, d in ((48, None), (37, None), (1, None), (37, (0, 10, 11, 37)))]
    for place, (length, documents) in enumerate(cases):
        found = sorted(pair for result in results for pair in result[place][0])
        ends = documents or (0, length)
        wanted = sorted(
            (i - begin, 100 + i, 101 + i)
            for begin, end in itertools.pairwise(ends)
            for i in range(begin, end - 1)
        )
        assert found == wanted
        assert results[0][place][1] == pytest.approx(max(1, len(wanted)) / world_size)


def padding_and_mean(rank: int, world_size: int) -> None:
    """A mask on the right is taken into the labels; the mean loss counts tokens of all ranks, and so do gradients."""
    ids = torch.arange(22).view(2, 11)
    mask = torch.ones(2, 11, dtype=torch.int64)
    mask[1, 6:] = 0
    shards = shard_batch({"input_ids": ids, "labels": ids.clone(), "attention_mask": mask}, None)
    labels = shards.inputs["shift_labels"]
    count = int((labels != IGNORE).sum())
    value = torch.tensor(float(count), requires_grad=True)
    mean = global_mean(value, count, group=None)
    mean.backward()
    if mean.item() != 1.0 or abs(value.grad.item() - world_size / 15) > 1e-6:
        raise AssertionError(f"mean {mean.item()}, gradient {value.grad.item()} of 15 tokens")


def test_padding_and_mean() -> None:
    run_distributed(2, padding_and_mean)


def refusals(rank: int, world_size: int) -> list[str]:
    ids = torch.arange(22).view(2, 11)
    left = torch.ones(2, 11)
    left[0, 0] = 0
    right = left.flip(1)
    calls = [
        ({"input_ids": ids, "attention_mask": left}, {}),
        ({"input_ids": ids, "attention_mask": right}, {"causal": False}),
        ({"input_ids": ids, "attention_mask": torch.zeros(2, 1, 11, 11)}, {}),
        ({"input_ids": ids, "other": torch.zeros(11)}, {}),
        ({"input_ids": ids}, {"buffers": {"other": 0}}),
        ({"labels": ids}, {}),
        ({"input_ids": ids}, {"layout": "spiral"}),
        ({"input_ids": ids}, {"cu_seqlens": [0, 11]}),
        ({"input_ids": ids[:1]}, {"cu_seqlens": [0, 12]}),
        ({"input_ids": ids}, {"causal": False}),
        ({"input_ids": ids, "labels": ids[:, :5]}, {}),
    ]
    texts = []
    for batch, options in calls:
        try:
            shard_batch(batch, None, **options)
            texts.append("nothing raised")
        except ValueError as error:
            texts.append(str(error))
    return texts


def test_refusals() -> None:
    parts = (
        "no layout can honour this attention_mask", "no layout can honour", "no layout can honour", 'buffers={"other"',
        "which the batch does not have", "neither input_ids nor inputs_embeds", "layout='spiral'",
        "cu_seqlens with a batch of 2", "does not describe 11 tokens", "need 1 more", "is not the sequence of 11",
    )  # fmt: skip
    for text, part in zip(run_distributed(2, refusals)[0], parts, strict=True):
        assert part in text, (part, text)
