"""Run the unsplit model and every split path on the same text and question, and judge them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interlace.bench import Placement, whole_machine
from interlace.bench.split_paths import SplitPath
from interlace.demo.parity import Error, Greedy, Parity, error_of, greedy, judge, limit_of, perplexity
from interlace.demo.text import QUESTION, SENTENCES, TEXT
from interlace.pretrained.models import Words, settings_of

__all__ = ["Outcome", "Subject", "Verdict", "compare"]

ANSWER_TOKENS = 24


@dataclass(frozen=True)
class Subject:
    """Everything a rank holds. Rank 0 also has the unsplit model, and `exact`: its weights in fp32."""

    paths: list[SplitPath]
    words: Words
    causal: bool
    dtype: torch.dtype
    unsplit: nn.Module | None
    exact: nn.Module | None

    @property
    def longest(self) -> int:
        """Tokens the model can take."""
        return int(getattr(settings_of(self.paths[0].model), "max_position_embeddings", 1 << 20))


@dataclass(frozen=True)
class Outcome:
    """What one model made of the text and the question; `answer` and `cosines` as a person reads them."""

    perplexity: float | None = None
    greedy: Greedy | None = None
    answer: str = ""
    cosines: tuple[float, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """Rank 0's judgement of all paths, and interlace's figures; `limit` is that of error.relative."""

    parity: Parity
    error: Error
    limit: float
    tokens: int
    unsplit: Outcome
    split: Outcome
    wrong: tuple[str, ...]


def compare(subject: Subject, placement: Placement) -> Verdict | None:
    """Collective. Every path is compared; the figures are interlace's. None on the ranks that do not judge.

    In 16 bits the judge is the unsplit model with the same weights in fp32, and the unsplit model in 16 bits
    shows how far off that precision is by itself.
    """
    ids = subject.words.encode(TEXT)[:, : subject.longest]
    want = yardstick = unsplit = None
    if subject.exact is not None and subject.unsplit is not None:
        with whole_machine(placement):
            want = _output(subject.exact, ids)
            if subject.exact is not subject.unsplit:
                yardstick = error_of(_output(subject.unsplit, ids), want)
            unsplit = _outcome(subject, subject.unsplit, want, ids, alone=True)
    wrong: list[str] = []
    verdict = None
    for path in subject.paths:
        with path.backend():
            got = _output(path.model, ids)
            split = _outcome(subject, path.model, got, ids, alone=False)
        if want is None or unsplit is None:
            continue
        error = error_of(got, want)
        parity = _parity(error, unsplit, split)
        reasons = judge(parity, error, yardstick, unsplit.greedy, split.greedy, subject.dtype)
        wrong += [f"{path.name}: {reason}" for reason in reasons]
        verdict = Verdict(parity, error, limit_of(yardstick), ids.shape[1], unsplit, split, ())
    return None if verdict is None else replace(verdict, wrong=tuple(wrong))


def _output(model: nn.Module, ids: Tensor) -> Tensor:
    """ids [1, S] -> logits [1, S, V] of a decoder, hidden states [1, S, H] of an encoder."""
    out = model(input_ids=ids)
    result: Tensor = out.logits if "logits" in out else out.last_hidden_state
    return result


def _outcome(subject: Subject, model: nn.Module, output: Tensor, ids: Tensor, *, alone: bool) -> Outcome:
    if not subject.causal:
        return Outcome(cosines=_cosines(subject.words, model))
    question = subject.words.ask(QUESTION)[:, -subject.longest // 2 :]
    steps = min(ANSWER_TOKENS, subject.longest - question.shape[1])
    taken = greedy(model, question, steps, _stops(model), alone=alone)
    return Outcome(perplexity(output, ids), taken, subject.words.decode(torch.tensor(taken.tokens)))


def _parity(error: Error, unsplit: Outcome, split: Outcome) -> Parity:
    equal = None
    if unsplit.greedy is not None and split.greedy is not None:
        equal = unsplit.greedy.tokens == split.greedy.tokens
    return Parity(error.absolute, equal, unsplit.perplexity, split.perplexity)


def _stops(model: nn.Module) -> set[int]:
    settings: Any = getattr(model, "generation_config", None) or settings_of(model)
    stop = settings.eos_token_id
    return set() if stop is None else set(stop) if isinstance(stop, list) else {stop}


def _cosines(words: Words, model: nn.Module) -> tuple[float, ...]:
    """Similarity of each pair of the sentences: the mean of a sentence's hidden states stands for it."""
    means = [_output(model, words.encode(sentence)).float().mean(1)[0] for sentence in SENTENCES]
    pairs = [(i, j) for i in range(len(means)) for j in range(i + 1, len(means))]
    return tuple(float(F.cosine_similarity(means[i], means[j], dim=0)) for i, j in pairs)
