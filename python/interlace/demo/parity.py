"""Is the split model the same model? Logits, perplexity and greedy text against the unsplit one."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from interlace.pretrained.decoder import Decoder

__all__ = ["Error", "Greedy", "Parity", "error_of", "greedy", "judge", "limit_of", "perplexity"]

# fp32, from 40 layers of a few hundred terms each: rounding alone gives 1e-6 to 3e-6 of the largest logit,
# whatever the order of the sums (unsplit against fp64 is as far off). A dropped or doubled bias, a wrong head
# or a wrong row gives 1e-2 and more. 1e-5 lies between the two with room on both sides.
FLOAT32_RELATIVE = 1e-5
# 16-bit: the unsplit model in the same dtype is off from the same weights computed in fp32; splitting rounds
# partial sums at other places, so it may be off as far again in another direction. The maximum over 1e7
# logits of two equally good roundings differs by up to a third, hence a factor and not 1.
HALF_FACTOR = 2.0
# Perplexity is the mean over hundreds of tokens: rounding averages out. 16-bit weights and activations leave
# 1e-2.
PERPLEXITY_RELATIVE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}


@dataclass(frozen=True)
class Error:
    """max |got - want|, and the same divided by max |want|."""

    absolute: float
    relative: float


@dataclass(frozen=True)
class Greedy:
    """Tokens taken one by one, always the likeliest; `margins`: its lead over the second, in logits."""

    tokens: list[int]
    margins: list[float]


@dataclass(frozen=True)
class Parity:
    """What the JSON holds. For an encoder hidden states are compared and the other three are None."""

    max_abs_logit_diff: float
    greedy_equal: bool | None
    perplexity_unsplit: float | None
    perplexity_split: float | None

    def keys(self) -> dict[str, float | bool | None]:
        return asdict(self)


def error_of(got: Tensor, want: Tensor) -> Error:
    """got, want of one shape, any dtype; NaN or infinity in either counts as infinitely wrong."""
    got, want = got.float(), want.float()
    if not bool(torch.isfinite(got).all()) or not bool(torch.isfinite(want).all()):
        return Error(math.inf, math.inf)
    absolute = float((got - want).abs().max())
    return Error(absolute, absolute / max(float(want.abs().max()), torch.finfo(torch.float32).tiny))


def perplexity(logits: Tensor, ids: Tensor) -> float:
    """logits [1, S, V], ids [1, S] -> exp of the mean negative log-likelihood of ids[1:], in fp32."""
    return math.exp(float(F.cross_entropy(logits[0, :-1].float(), ids[0, 1:])))


def greedy(model: nn.Module, ids: Tensor, steps: int, stop: set[int], *, alone: bool = False) -> Greedy:
    """Continue ids [1, S] by up to `steps` tokens, with a key/value cache; ends after a token of `stop`.

    On several ranks all take the token of rank 0: a tie that rounds differently must not send them apart.
    `alone`: only this rank runs the model.
    """
    tokens: list[int] = []
    margins: list[float] = []
    decoder = Decoder(model)
    while len(tokens) < steps and not (tokens and tokens[-1] in stop):
        best = decoder(ids).float().topk(2)
        token = best.indices[0]
        if not alone and dist.is_initialized():
            dist.broadcast(token, 0)
        tokens.append(int(token))
        margins.append(float(best.values[0] - best.values[1]))
        ids = token.view(1, 1)
    return Greedy(tokens, margins)


def limit_of(yardstick: Error | None) -> float:
    """The largest relative error that passes; yardstick as in `judge`."""
    return FLOAT32_RELATIVE if yardstick is None else HALF_FACTOR * yardstick.relative


def judge(
    parity: Parity,
    error: Error,
    yardstick: Error | None,
    unsplit: Greedy | None,
    split: Greedy | None,
    dtype: torch.dtype,
) -> list[str]:
    """Reasons why the split model is not the unsplit one, empty when it is; NaN anywhere is a reason.

    yardstick: error of the unsplit model in the same 16-bit dtype, None in fp32. Greedy texts may part only
    where the unsplit model's lead is smaller than what rounding moves a pair of logits by.
    """
    wrong: list[str] = []
    limit = limit_of(yardstick)
    if not error.relative <= limit:
        wrong.append(f"outputs differ by {error.relative:.2e} of the largest, more than {limit:.2e}")
    if parity.perplexity_split is not None and parity.perplexity_unsplit is not None:
        off = abs(parity.perplexity_split / parity.perplexity_unsplit - 1.0)
        if not off <= PERPLEXITY_RELATIVE[dtype]:
            wrong.append(f"perplexity is off by {off:.2e}, more than {PERPLEXITY_RELATIVE[dtype]:.0e}")
    if unsplit is not None and split is not None and unsplit.tokens != split.tokens:
        wrong += _parting(
            unsplit, split, 2.0 * error.absolute + (2.0 * yardstick.absolute if yardstick else 0.0)
        )
    return wrong


def _parting(unsplit: Greedy, split: Greedy, tie: float) -> list[str]:
    pairs = zip(unsplit.tokens, split.tokens, strict=False)
    place = next(
        (i for i, (a, b) in enumerate(pairs) if a != b), min(len(unsplit.tokens), len(split.tokens)) - 1
    )
    margin = unsplit.margins[place]
    if margin <= tie:
        return []
    return [f"greedy text parts at token {place + 1}, unsplit leading by {margin:.3f} (tie: {tie:.3f})"]
