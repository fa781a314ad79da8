"""Embedding and output head in `parallelize`: cut together or left whole with a reason, tied as before."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interlace.families.catalogue import FAMILIES, build
from interlace.modules import VocabParallelEmbedding, VocabParallelHead
from interlace.parallelize.api import parallelize
from interlace.parallelize.plan import Place
from interlace.parallelize.report import report
from interlace.parallelize.structure import auto_plan
from tests.distributed import run_distributed
from tests.parallelize import models
from tests.parallelize.test_parallelize import IDS, MLP_PLAN, Head, Layer, Net, _compare

# what families call the modules that hold the vocabulary; ViT has none
VOCABULARIES = {
    **{name: {"model.embed_tokens", "lm_head"} for name in ("llama", "qwen3", "gemma3", "phi", "phi3")},
    "gpt_neox": {"gpt_neox.embed_in", "lm_head"},
    "gpt2": {"transformer.wte", "lm_head"},
    "opt": {"model.decoder.embed_tokens", "lm_head"},
    "bloom": {"transformer.word_embeddings", "lm_head"},
    "falcon": {"transformer.word_embeddings", "lm_head"},
    "falcon_grouped": {"transformer.word_embeddings", "lm_head"},
    "bert": {"bert.embeddings.word_embeddings", "cls.predictions.decoder"},
    "roberta": {"roberta.embeddings.word_embeddings", "lm_head.decoder"},
    "t5": {"shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head"},
    "t5_gated": {"shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head"},
    "whisper": {"model.decoder.embed_tokens", "proj_out"},
    "vit": set(),
}


def test_every_family_has_its_vocabulary_cut() -> None:
    """No position or type embedding among them, and nothing left whole in silence."""
    for name, expected in VOCABULARIES.items():
        plan = auto_plan(build(FAMILIES[name]), Place(0, 2))
        found = {module for module, step in plan.steps.items() if step.style.startswith("vocab_")}
        assert found == expected, f"{name}: {found}"


def _tied(rank: int, world_size: int) -> None:
    for family, tied in (("llama", True), ("llama", False), ("gemma3", True), ("bert", True)):
        model = models.make(family, tie_word_embeddings=tied)
        ids = torch.randint(0, 61, (2, 7), generator=torch.Generator().manual_seed(1))
        split = models.check_split(model, ids)
        embedding, head = split.get_input_embeddings(), split.get_output_embeddings()
        assert isinstance(embedding, VocabParallelEmbedding) and isinstance(head, VocabParallelHead)
        assert (head.weight is embedding.weight) == tied, family
        assert embedding.weight.shape[0] == head.weight.shape[0] == embedding.shards.sizes[rank]
        if family == "bert":
            assert head.bias is split.cls.predictions.bias and head.bias.shape == (61,)
        with pytest.raises(RuntimeError, match=r"resize before interlace\.parallelize"):
            split.resize_token_embeddings(70)
        with pytest.raises(ValueError, match=r"ids holds \d+; expected 0 to 60"):
            split(input_ids=ids + 61)
        buffer = io.BytesIO()
        torch.save(split, buffer)
        buffer.seek(0)
        expected = split(input_ids=ids).logits
        for other in (copy.deepcopy(split), torch.load(buffer, weights_only=False)):
            assert torch.equal(other(input_ids=ids).logits, expected)
            same = other.get_input_embeddings().weight is other.get_output_embeddings().weight
            assert same == tied, "the tie is lost in a copy"


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_tied_vocabularies_stay_tied_and_right(world_size: int) -> None:
    """61 entries do not divide; Gemma scales its embedding in a subclass; BERT's head shares its bias."""
    run_distributed(world_size, _tied)


class Decoder(Net):
    """Net with attention and feed-forward in one layer each, which plan="auto" knows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(Head(4, 2), Layer()) for _ in range(2)]).double()


class Reader(Decoder):
    """Multiplies with the weight of the embedding instead of calling a head."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.linear(x, self.embed.weight)


class Odd(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight).tanh()


class Looker(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.embed = Odd(9, 6).double()


class Third(Decoder):
    """The weight is a parameter of the model itself, too."""

    def __init__(self) -> None:
        super().__init__()
        self.shared_weight = self.embed.weight


class Normed(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.embed.max_norm = 1.0


CASES: list[tuple[Callable[[], nn.Module], str]] = [
    (Reader, r"Reader\.forward reads embed\.weight without calling embed"),
    (Looker, "does not get its rows from super"),
    (Third, r"its weight is also \.shared_weight of a Third"),
    (Normed, r"max_norm=1\.0 changes rows"),
]


def _whole(rank: int, world_size: int) -> None:
    for make, reason in CASES:
        whole = make()
        split = parallelize(copy.deepcopy(whole), None)
        assert type(split.embed) is type(whole.embed), reason
        assert re.search(reason, split.embed.whole_because), split.embed.whole_because
        assert split.head.weight is split.embed.weight or whole.head.weight is not whole.embed.weight
        rows = {row.name: row for row in report(split).rows}
        assert rows["embed"].style == "whole" and rows["embed"].path == split.embed.whole_because
        _compare(split, whole)
    plain = Decoder()
    split = parallelize(copy.deepcopy(plain), None)
    assert isinstance(split.embed, VocabParallelEmbedding) and isinstance(split.head, VocabParallelHead)
    _compare(split, plain)


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_cannot_be_cut_stays_whole_and_says_why(world_size: int) -> None:
    """A shard where the forward reads the weight itself would give wrong logits of the wrong size."""
    run_distributed(world_size, _whole)


def _named(rank: int, world_size: int) -> None:
    whole = Net()
    both = {"embed": "embedding_rowwise", "head": "vocab_head"}
    gathered = {"embed": "vocab_embedding", "head": "column_gather_output"}
    for plan in (both, gathered):
        split = parallelize(copy.deepcopy(whole), None, MLP_PLAN | plan)
        assert split.head.weight is split.embed.weight and isinstance(split.embed, VocabParallelEmbedding)
        _compare(split, whole)
    sequence = both | MLP_PLAN | {"layers.*.norm": "summed", "layers.0": "scatter_sequence"}
    sequence["layers.1"] = "gather_sequence"
    _compare(parallelize(copy.deepcopy(whole), None, sequence, sequence_parallel=True), whole)
    for plan, error, text in (
        (
            {"embed": "vocab_embedding"},
            ValueError,
            r"tied parameter would be cut .*embed\.weight .*head\.weight",
        ),
        ({"embed": "vocab_head", "head": "vocab_head"}, TypeError, "embed: vocab_head expects an Linear"),
        ({"head": "vocab_embedding"}, TypeError, "head: vocab_embedding expects an Embedding, got Linear"),
    ):
        with pytest.raises(error, match=text):
            parallelize(copy.deepcopy(whole), None, plan)
    sparse = Net()
    sparse.embed.sparse = True
    with pytest.raises(ValueError, match="embed: sparse=True is not supported"):
        parallelize(sparse, None, both)
    assert isinstance(sparse.layers[0], Layer) and sparse(IDS).shape == (2, 5, 9)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_plan_may_name_embedding_and_head(world_size: int) -> None:
    """By our names and by those of Hugging Face plans; one cut and its twin not is an error, model unchanged."""
    run_distributed(world_size, _named)
