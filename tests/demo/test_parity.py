"""The judge: what passes, what does not, and that NaN never does."""

from __future__ import annotations

import math

import pytest
import torch

from interlace.demo.parity import Error, Greedy, Parity, error_of, judge, perplexity

EQUAL = Parity(1e-6, True, 20.0, 20.0)
TEXT = Greedy([1, 2, 3], [1.0, 1.0, 1.0])


def test_equal_models_pass():
    """Without this the failures below could come from a judge that fails everything."""
    assert judge(EQUAL, Error(1e-6, 1e-7), None, TEXT, TEXT, torch.float32) == []


@pytest.mark.parametrize("relative", [2e-5, math.nan, math.inf])
def test_outputs_that_differ_fail(relative: float):
    """Catches `error > limit`, which is false for NaN."""
    assert len(judge(EQUAL, Error(1.0, relative), None, TEXT, TEXT, torch.float32)) == 1


@pytest.mark.parametrize("split", [20.1, math.nan])
def test_perplexity_that_differs_fails(split: float):
    """Catches a model whose last token is right and whose others are not."""
    parity = Parity(1e-6, True, 20.0, split)
    assert "perplexity" in judge(parity, Error(1e-6, 1e-7), None, TEXT, TEXT, torch.float32)[0]


def test_sixteen_bits_may_be_twice_as_far_off_as_sixteen_bits_unsplit():
    """Catches a fixed limit for 16 bits: what is right depends on the model, and unsplit shows it."""
    yardstick = Error(0.5, 2e-2)
    assert judge(EQUAL, Error(0.9, 3.9e-2), yardstick, TEXT, TEXT, torch.bfloat16) == []
    assert len(judge(EQUAL, Error(1.1, 4.1e-2), yardstick, TEXT, TEXT, torch.bfloat16)) == 1


def test_greedy_texts_may_part_at_a_tie_only():
    """Catches a flaky verdict at ties, and one that forgives a wrong token the model is sure of."""
    other = Greedy([1, 9, 9], [1.0, 0.1, 1.0])
    tie = Greedy([1, 2, 3], [1.0, 1e-6, 1.0])
    assert judge(EQUAL, Error(1e-6, 1e-7), None, tie, other, torch.float32) == []
    assert "token 2" in judge(EQUAL, Error(1e-6, 1e-7), None, TEXT, other, torch.float32)[0]


def test_an_error_is_measured_against_the_largest_value():
    """Catches a relative error per element, which explodes at zeros."""
    error = error_of(torch.tensor([0.0, 4.0]), torch.tensor([1e-3, 4.0]))
    assert error.absolute == pytest.approx(1e-3)
    assert error.relative == pytest.approx(2.5e-4)
    assert error_of(torch.tensor([math.nan]), torch.tensor([1.0])).absolute == math.inf


def test_perplexity_of_uniform_logits_is_the_vocabulary():
    """Catches an off-by-one between logits and the tokens they predict, and a sum where the mean belongs."""
    assert perplexity(torch.zeros(1, 5, 7), torch.tensor([[0, 1, 2, 3, 4]])) == pytest.approx(7.0)
    ids = torch.tensor([[0, 1, 2]])
    sure = torch.nn.functional.one_hot(torch.tensor([[1, 2, 0]]), 7).float() * 100
    assert perplexity(sure, ids) == pytest.approx(1.0)
