"""Cross entropy over a cut vocabulary against F.cross_entropy of the whole logits, loss and all gradients."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import interlace.functional as il
from interlace import CollectiveAborted
from interlace.modules import Shards, VocabParallelCrossEntropy
from tests import oracle
from tests.distributed import run_distributed

WORLDS = (1, 2, 3, 4)
EXACT = {"rtol": 1e-10, "atol": 1e-11, "equal_nan": True}
OPTIONS = [
    {},
    {"label_smoothing": 0.1},
    {"label_smoothing": 1.0, "reduction": "sum"},
    {"z_loss": 1e-2, "reduction": "none"},
    {"label_smoothing": 0.2, "z_loss": 1e-3},
    {"ignore_index": 2},
]


def _cuts(vocab: int, world_size: int) -> list[Shards]:
    """The convention of torch.chunk, and one in which the first rank holds one entry and the second none."""
    sizes = [1, 0, vocab - 3, 2][:world_size]
    if world_size > 1:
        sizes[-1] += vocab - sum(sizes)
    return [Shards.chunk(vocab, world_size), *([Shards.partition(sizes)] if world_size > 1 else [])]


def _expected(logits: Tensor, target: Tensor, options: dict) -> Tensor:
    """torch's loss, and the z-loss written down plainly."""
    z_loss, ignore = options.get("z_loss", 0.0), options.get("ignore_index", -100)
    rest = {k: v for k, v in options.items() if k not in ("z_loss", "reduction")}
    rows = F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="none", **rest)
    kept = target.flatten() != ignore
    rows = rows + torch.where(kept, z_loss * logits.flatten(0, -2).logsumexp(-1).square(), 0.0)
    reduction = options.get("reduction", "mean")
    if reduction == "none":
        return rows.view(target.shape)
    return rows.sum() if reduction == "sum" else rows.sum() / kept.sum()


def _inputs(vocab: int, seed: int, shape: tuple[int, ...] = (2, 5)) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * oracle.normals((*shape, vocab), torch.float64, generator)
    target = torch.randint(0, vocab, shape, generator=generator)
    target.view(-1)[1::4] = -100
    return logits, target


def _weights(loss: Tensor) -> Tensor:
    """What comes from above, different for every row."""
    return torch.linspace(0.5, 2.0, max(loss.numel(), 1), dtype=loss.dtype).view(loss.shape)


def _loss(rank: int, world_size: int) -> None:
    for vocab, (i, options) in itertools.product((11, 3, 1), enumerate(OPTIONS)):
        logits, target = _inputs(vocab, seed=i)
        if "ignore_index" in options:
            target = target.where(target >= 0, torch.tensor(options["ignore_index"] % vocab))
            options = options | {"ignore_index": options["ignore_index"] % vocab}
        whole = logits.clone().requires_grad_()
        expected = _expected(whole, target, options)
        expected.backward(_weights(expected))
        for shards in _cuts(vocab, world_size) if vocab > 3 else [Shards.chunk(vocab, world_size)]:
            start, end = shards.bounds(rank)
            mine = logits[..., start:end].clone().requires_grad_()
            where = {} if shards.is_chunk else {"vocab_start": start}
            loss = il.vocab_parallel_cross_entropy(
                mine, target, group=None, vocab_size=vocab, **where, **options
            )
            loss.backward(_weights(loss))
            what = f"vocab={vocab} {options} {shards}"
            torch.testing.assert_close(loss, expected, **EXACT, msg=lambda m, w=what: f"{w}: {m}")
            torch.testing.assert_close(
                mine.grad, whole.grad[..., start:end], **EXACT, msg=lambda m, w=what: f"{w}: {m}"
            )
            oracle.check_same_on_all_ranks(what, loss)


@pytest.mark.parametrize("world_size", WORLDS)
def test_loss_and_gradient_are_those_of_the_whole_logits(world_size: int) -> None:
    """Every option; shards of one entry and of none; the smoothed part divides by the whole vocabulary."""
    run_distributed(world_size, _loss)


def _edges(rank: int, world_size: int) -> None:
    def ours(logits: Tensor, target: Tensor, **options: object) -> Tensor:
        start, end = Shards.chunk(logits.shape[-1], world_size).bounds(rank)
        return il.vocab_parallel_cross_entropy(
            logits[..., start:end], target, group=None, vocab_size=logits.shape[-1], **options
        )

    logits, target = _inputs(7, seed=3)
    logits.requires_grad_()
    nothing = torch.full_like(target, -100)
    assert math.isnan(ours(logits, nothing).item()), "torch's mean of nothing is NaN"
    assert ours(logits, nothing, reduction="sum").item() == 0
    ours(logits, nothing, reduction="sum").backward()
    assert not logits.grad.any()
    assert ours(logits[:0], target[:0], reduction="none").shape == (0, 5)
    assert ours(logits[0, 0], target[0, 0] * 0).item() == pytest.approx(
        F.cross_entropy(logits[0, 0], target[0, 0] * 0).item()
    )
    far = torch.tensor([[1e4, -1e4, 0.0, 9e3, -math.inf, 3.0, -9e3]], dtype=torch.float32)
    for label in (0, 1, 3):
        expected = F.cross_entropy(far.double(), torch.tensor([label]))
        torch.testing.assert_close(ours(far, torch.tensor([label])).double(), expected, rtol=1e-6, atol=1e-6)
    masked = far.clone()
    masked[:, :4] = -math.inf  # a shard of which every logit is masked out
    assert ours(masked, torch.tensor([5])).item() == pytest.approx(0.0, abs=1e-6)
    int32 = ours(logits, target.clamp_min(0).to(torch.int32))
    assert torch.equal(int32, ours(logits, target.clamp_min(0)))
    with torch.no_grad():
        assert not ours(logits, target).requires_grad


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_edges_behave_as_in_torch(world_size: int) -> None:
    """All ignored, no rows, a single row, logits that overflow exp, a shard of -inf only."""
    run_distributed(world_size, _edges)


def _half(rank: int, world_size: int) -> None:
    logits, target = _inputs(1000, seed=5, shape=(64,))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rounded = logits.to(dtype)
        start, end = Shards.chunk(1000, world_size).bounds(rank)
        exact, same, mine = rounded.double(), rounded.clone(), rounded[:, start:end].clone()
        found = [t.requires_grad_() for t in (exact, same, mine)]
        options = {"label_smoothing": 0.1, "reduction": "none"}
        losses = [
            F.cross_entropy(exact, target, **options),
            F.cross_entropy(same.float(), target, **options),
            il.vocab_parallel_cross_entropy(mine, target, group=None, vocab_size=1000, **options),
        ]
        assert losses[2].dtype == torch.float32
        for loss in losses:
            loss.mean().backward()
        oracle.check_close(f"loss of {dtype}", losses[2].detach(), losses[0].detach(), losses[1].detach())
        grads = [t.grad if t is mine else t.grad[:, start:end] for t in found]
        oracle.check_close(f"gradient of {dtype}", grads[2], grads[0], grads[1])


def test_half_precision_logits_are_summed_in_fp32() -> None:
    """A sum of 1000 exponentials in bf16 stops growing at 256."""
    run_distributed(2, _half)


def _fused(rank: int, world_size: int) -> None:
    generator = torch.Generator().manual_seed(9)
    vocab, hidden, tokens = 13, 6, 7
    weight, bias, x = (
        oracle.normals(shape, torch.float64, generator)
        for shape in ((vocab, hidden), (vocab,), (2, tokens, hidden))
    )
    target = torch.randint(0, vocab, (2, tokens), generator=generator)
    target[0, :3] = -100
    start, end = Shards.chunk(vocab, world_size).bounds(rank)
    for chunk, sequence, has_bias, options in itertools.product(
        (None, 1, 4, 100), (False, True), (False, True), (OPTIONS[0], OPTIONS[4])
    ):
        whole = [t.clone().requires_grad_() for t in (x, weight, bias)]
        expected = _expected(F.linear(whole[0], whole[1], whole[2] if has_bias else None), target, options)
        expected.backward()
        x_local = oracle.chunk(x, 1, rank, world_size) if sequence else x
        mine = [t.clone().requires_grad_() for t in (x_local, weight[start:end], bias[start:end])]
        loss = il.vocab_parallel_linear_cross_entropy(
            mine[0], mine[1], target, mine[2] if has_bias else None, group=None, vocab_size=vocab,
            gather_dim=1 if sequence else None, gather_size=tokens if sequence else None, chunk_rows=chunk,
            **options,
        )  # fmt: skip
        loss.backward()
        what = f"chunk_rows={chunk} sequence={sequence} bias={has_bias} {options}"
        torch.testing.assert_close(loss, expected, **EXACT, msg=lambda m, w=what: f"{w}: {m}")
        x_grad = oracle.chunk(whole[0].grad, 1, rank, world_size) if sequence else whole[0].grad
        wanted = [x_grad, whole[1].grad[start:end], whole[2].grad[start:end] if has_bias else None]
        for ours, want in zip((t.grad for t in mine), wanted, strict=True):
            if want is not None:
                torch.testing.assert_close(ours, want, **EXACT, msg=lambda m, w=what: f"{w}: {m}")


@pytest.mark.parametrize("world_size", WORLDS)
def test_head_and_loss_in_one_never_gather_logits(world_size: int) -> None:
    """In chunks of rows as well, which compute the logits again; from a shard of the sequence as well."""
    run_distributed(world_size, _fused)


def _compiled(rank: int, world_size: int) -> None:
    start, end = Shards.chunk(11, world_size).bounds(rank)
    module = VocabParallelCrossEntropy(11, label_smoothing=0.1, z_loss=1e-3)

    def step(logits: Tensor, target: Tensor) -> Tensor:
        return module(logits * 2, target)

    for dynamic in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        for rows in (5, 8):
            logits, target = _inputs(11, seed=rows, shape=(2, rows))
            results = []
            for run in (step, compiled):
                mine = logits[..., start:end].clone().requires_grad_()
                loss = run(mine, target)
                loss.backward()
                results.append((loss.detach(), mine.grad))
            torch.testing.assert_close(results[1], results[0], **EXACT)
    with pytest.raises(RuntimeError, match="out of range"):
        compiled(logits[..., start:end].clone(), target + 11)


def test_loss_compiles_without_graph_breaks() -> None:
    """Targets are still checked, by an assertion that stays in the graph."""
    run_distributed(2, _compiled, timeout=240.0)


def _mistakes(rank: int, world_size: int) -> None:
    logits = torch.randn(3, 4)
    target = torch.tensor([0, 1, 2])

    def call(**options: object) -> Tensor:
        given = {"target": target, "group": None, "vocab_size": 8, **options}
        return il.vocab_parallel_cross_entropy(logits, **given)

    for options, error, text in (
        (
            {"target": torch.tensor([0, 8, 1])},
            ValueError,
            r"target holds 8; expected 0 to 7 or ignore_index=-100",
        ),
        ({"target": torch.tensor([0, -1, 1])}, ValueError, "target holds -1"),
        ({"target": target.float()}, TypeError, "target is torch.float32; expected int32 or int64"),
        ({"target": target[:2]}, ValueError, r"target is \[2\], expected \[3\]"),
        ({"vocab_size": 10}, ValueError, r"vocab_size=10 gives rank \d of 2 5 entries, got 4"),
        ({"vocab_start": 6}, ValueError, "entries 6 to 10 are not within vocab_size=8"),
        ({"reduction": "max"}, ValueError, "reduction='max'; expected one of mean, sum, none"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing=1.5; expected 0 to 1"),
    ):
        with pytest.raises(error, match=text):
            call(**options)
    # 9 entries are 5 and 4: a mistake of rank 0 alone, which its peer hears of
    with pytest.raises((ValueError, CollectiveAborted), match="rank 0 of 2 5 entries, got 4"):
        call(vocab_size=9)
    call()
    loss = il.vocab_parallel_cross_entropy(logits.requires_grad_(), target, group=None, vocab_size=8)
    with pytest.raises(RuntimeError, match="no second derivative; do not pass create_graph=True"):
        torch.autograd.grad(loss, logits, create_graph=True)


def test_mistakes_are_errors_on_every_rank_and_the_group_lives_on() -> None:
    """A second derivative is refused as well: the saved sum over the vocabulary has no graph."""
    run_distributed(2, _mistakes)
