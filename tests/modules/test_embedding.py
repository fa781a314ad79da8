"""VocabParallelEmbedding and VocabParallelHead against nn.Embedding and nn.Linear, with all their gradients."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import interlace.functional as il
from interlace.modules import Shards, VocabParallelEmbedding, VocabParallelHead, layouts_of
from tests import oracle
from tests.distributed import run_distributed

WORLDS = (1, 2, 3, 4)
EXACT = {"rtol": 1e-10, "atol": 1e-11}


def _ids(vocab: int, seed: int, dtype: torch.dtype = torch.int64) -> Tensor:
    ids = torch.randint(0, vocab, (2, 7), generator=torch.Generator().manual_seed(seed))
    ids[0, :2] = 0
    ids[1, -1] = vocab - 1
    return ids.to(dtype)


def _own(t: Tensor, module: nn.Module) -> Tensor:
    start, end = module.shards.bounds(module.rank)
    return t[start:end]


def _embedding(rank: int, world_size: int) -> None:
    for vocab, padding, frequency, sequence in itertools.product(
        (11, 8, 2), (None, 0, -1), (False, True), (False, True)
    ):
        what = f"vocab={vocab} padding={padding} scale_grad_by_freq={frequency} sequence={sequence}"
        torch.manual_seed(vocab)
        whole = nn.Embedding(vocab, 5, padding, scale_grad_by_freq=frequency, dtype=torch.float64)
        ours = VocabParallelEmbedding.from_embedding(whole, sequence_parallel=sequence)
        ids = _ids(vocab, seed=vocab, dtype=torch.int32 if frequency else torch.int64)
        expected = whole(ids)
        grad = oracle.normals(expected.shape, torch.float64, torch.Generator().manual_seed(1))
        expected.backward(grad)
        out = ours(ids)
        cut = (lambda t: oracle.chunk(t, -2, rank, world_size)) if sequence else (lambda t: t)
        assert torch.equal(out, cut(expected)), f"{what}: not bitwise the rows of the whole"
        out.backward(cut(grad).contiguous())
        torch.testing.assert_close(
            ours.weight.grad, _own(whole.weight.grad, ours), **EXACT, msg=lambda m, w=what: f"{w}: {m}"
        )
        assert (ours.num_embeddings, ours.embedding_dim, ours.padding_idx) == (vocab, 5, whole.padding_idx)


@pytest.mark.parametrize("world_size", WORLDS)
def test_lookup_and_gradient_are_those_of_the_whole_embedding(world_size: int) -> None:
    """2 entries leave ranks with none; an id of another rank must not count as one of this rank's last row."""
    run_distributed(world_size, _embedding)


def _tied(rank: int, world_size: int) -> None:
    vocab, hidden = 11, 6
    for bias, gather, sequence, padding in itertools.product(*[(False, True)] * 3, (None, 0)):
        what = f"bias={bias} gather_output={gather} sequence_parallel={sequence} padding={padding}"
        torch.manual_seed(4)
        whole_in = nn.Embedding(vocab, hidden, padding, dtype=torch.float64)
        whole_out = nn.Linear(hidden, vocab, bias=bias, dtype=torch.float64)
        whole_out.weight = whole_in.weight
        embedding = VocabParallelEmbedding.from_embedding(whole_in, sequence_parallel=sequence)
        head = VocabParallelHead.from_linear(whole_out, gather_output=gather, sequence_parallel=sequence)
        head.weight = embedding.weight
        assert head.bias is whole_out.bias, "a bias that may be tied elsewhere was copied"
        ids = _ids(vocab, seed=2)
        expected = whole_out(whole_in(ids).tanh())
        weights = oracle.normals(expected.shape, torch.float64, torch.Generator().manual_seed(3))
        (expected * weights).sum().backward()
        want, want_bias = whole_in.weight.grad, whole_out.bias.grad if bias else None
        head.zero_grad()
        logits = head(embedding(ids).tanh(), gather_size=7 if sequence else None)
        start, end = (0, vocab) if gather else head.shards.bounds(rank)
        torch.testing.assert_close(
            logits, expected[..., start:end], **EXACT, msg=lambda m, w=what: f"{w}: {m}"
        )
        (logits * weights[..., start:end]).sum().backward()
        torch.testing.assert_close(
            head.weight.grad, _own(want, head), **EXACT, msg=lambda m, w=what: f"{w}: {m}"
        )
        if want_bias is not None:
            torch.testing.assert_close(head.bias.grad, want_bias, **EXACT, msg=lambda m, w=what: f"{w}: {m}")


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_tied_head_adds_its_gradient_to_the_embedding(world_size: int) -> None:
    """One Parameter for both; the bias of the head is whole and its gradient the full sum."""
    run_distributed(world_size, _tied)


def _loss_of_head(rank: int, world_size: int) -> None:
    torch.manual_seed(5)
    whole = nn.Linear(6, 11, dtype=torch.float64)
    x = torch.randn(2, 7, 6, dtype=torch.float64)
    target = _ids(11, seed=6)
    target[0, 3] = -100
    for chunk in (None, 3):
        results = []
        for head in (whole, VocabParallelHead.from_linear(copy.deepcopy(whole))):
            head.zero_grad()
            mine = x.clone().requires_grad_()
            if head is whole:
                loss = F.cross_entropy(head(mine).flatten(0, 1), target.flatten(), label_smoothing=0.1)
            else:
                loss = head.loss(mine, target, label_smoothing=0.1, chunk_rows=chunk)
            loss.backward()
            weight = (
                head.weight.grad if head is not whole else _own(head.weight.grad, VocabParallelHead(6, 11))
            )
            results.append((loss.detach(), mine.grad, weight, head.bias.grad.clone()))
        torch.testing.assert_close(results[1], results[0], **EXACT)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_loss_of_the_head_is_that_of_its_logits(world_size: int) -> None:
    """The whole bias has the whole gradient, though every rank used its part of it only."""
    run_distributed(world_size, _loss_of_head)


class Scaled(nn.Embedding):
    """As Gemma writes it: a subclass that scales what the lookup gives."""

    def __init__(self, vocab: int, hidden: int, scale: float) -> None:
        super().__init__(vocab, hidden)
        self.register_buffer("scale", torch.tensor(scale), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.scale.to(self.weight.dtype)


def _behaviour(rank: int, world_size: int) -> None:
    ids = _ids(11, seed=8)
    for cls, arguments in ((nn.Embedding, ()), (Scaled, (3.0,))):
        torch.manual_seed(6)
        whole = cls(11, 5, *arguments).requires_grad_(False).eval()
        ours = VocabParallelEmbedding.from_embedding(whole)
        assert isinstance(ours, cls) and isinstance(ours, VocabParallelEmbedding)
        assert not ours.weight.requires_grad and not ours.training
        assert whole.weight.shape == (11, 5), "the original changed"
        assert list(ours.state_dict()) == ["weight"]
        for other in (ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            assert torch.equal(other(ids), whole(ids)), cls
        assert torch.equal(ours.double()(ids), whole.double()(ids))
        layout = layouts_of(ours)["weight"]
        assert torch.equal(layout.take(whole.weight, rank), ours.weight)
    torch.manual_seed(7)
    drawn = nn.Embedding(11, 5, padding_idx=3)
    torch.manual_seed(7)
    assert torch.equal(VocabParallelEmbedding(11, 5, padding_idx=3).weight, _own(drawn.weight, ours))
    torch.manual_seed(7)
    linear = nn.Linear(5, 11)
    torch.manual_seed(7)
    head = VocabParallelHead(5, 11)
    assert torch.equal(head.weight, _own(linear.weight, head)) and torch.equal(head.bias, linear.bias)
    assert list(layouts_of(head)) == ["weight"]
    assert VocabParallelEmbedding(11, 5, device="meta").weight.is_meta
    with torch.autocast("cpu", torch.bfloat16):
        assert head(torch.randn(3, 5)).dtype == torch.bfloat16
    if world_size == 3:  # sizes that are not torch.chunk's, through the function
        shards = Shards.partition((1, 0, 10))
        start, end = shards.bounds(rank)
        weight = drawn.weight.detach()[start:end].clone().requires_grad_()
        out = il.vocab_parallel_embedding(ids, weight, group=None, vocab_size=11, vocab_start=start)
        assert torch.equal(out, drawn(ids))


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_nn_embedding_promises_stays(world_size: int) -> None:
    """Seeded draw, names, copies, pickles, dtype; a subclass keeps its own forward around the lookup."""
    run_distributed(world_size, _behaviour)


def _compiled(rank: int, world_size: int) -> None:
    torch.manual_seed(8)
    embedding = VocabParallelEmbedding(11, 6, padding_idx=0, dtype=torch.float64)
    head = VocabParallelHead(6, 11, dtype=torch.float64)
    head.weight = embedding.weight

    def step(ids: Tensor) -> Tensor:
        return head(embedding(ids).tanh())

    for dynamic in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        for tokens in (5, 7):
            ids = _ids(11, seed=tokens)[:, :tokens]
            results = []
            for run in (step, compiled):
                embedding.zero_grad()
                out = run(ids)
                out.square().sum().backward()
                results.append((out.detach(), embedding.weight.grad.clone()))
            torch.testing.assert_close(results[1], results[0], **EXACT)
    with pytest.raises(RuntimeError, match="out of range"):
        compiled(ids + 11)


def test_embedding_and_head_compile_without_graph_breaks() -> None:
    """The check of the ids stays in the graph."""
    run_distributed(2, _compiled, timeout=240.0)


def _mistakes(rank: int, world_size: int) -> None:
    embedding = VocabParallelEmbedding(11, 5)
    for ids, error, text in (
        (torch.tensor([3, 11]), ValueError, "ids holds 11; expected 0 to 10"),
        (torch.tensor([-1]), ValueError, "ids holds -1; expected 0 to 10"),
        (torch.tensor([1.0]), TypeError, "ids is torch.float32; expected int32 or int64"),
    ):
        with pytest.raises(error, match=text):
            embedding(ids)
    assert embedding(torch.zeros(0, dtype=torch.int64)).shape == (0, 5)
    split = VocabParallelEmbedding.from_embedding
    for call, error, text in (
        (lambda: VocabParallelEmbedding(11, 5, max_norm=1.0), ValueError, "max_norm=1.0 changes rows"),
        (lambda: VocabParallelEmbedding(11, 5, sparse=True), ValueError, "sparse=True is not supported"),
        (lambda: VocabParallelEmbedding(11, 5, padding_idx=11), ValueError, "padding_idx=11 is not within"),
        (lambda: VocabParallelEmbedding(-1, 5), ValueError, "num_embeddings=-1"),
        (lambda: split(nn.Embedding(11, 5, sparse=True)), ValueError, "sparse=True"),
        (lambda: split(embedding), TypeError, "is a VocabParallelEmbedding already"),
        (lambda: split(nn.Linear(5, 11)), TypeError, "expected an nn.Embedding, got Linear"),
    ):
        with pytest.raises(error, match=text):
            call()


def test_mistakes_are_errors_and_not_rows_of_zeros() -> None:
    """An id that no rank holds would come out as zeros, where nn.Embedding raises."""
    run_distributed(2, _mistakes)
