"""Right or wrong: how far a result is from the oracle, and by how many values."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["LIMIT", "difference", "relative_error"]

# max |got - want| / max |want|. fp32: sums of a few thousand products round to 1e-6 of the largest. bf16:
# partial sums and the result are rounded to 8 bits, 2^-9 each, three times at most. fp64 and integers are exact to us.
LIMIT = {
    torch.float32: 1e-5,
    torch.bfloat16: 1e-2,
    torch.float16: 1e-3,
    torch.float64: 1e-12,
    torch.int64: 0.0,
}


def difference(got: Tensor, want: Tensor, limit: float) -> tuple[float, int]:
    """(max |got - want| / max |want|, how many values are beyond `limit` of it), in fp64.

    NaN and infinity in `got` are infinitely off; so is another shape, with every value of it.
    """
    if got.shape != want.shape:
        return math.inf, max(got.numel(), want.numel(), 1)
    if not want.numel():
        return 0.0, 0
    largest = max(float(want.abs().max()), 1e-30)
    off = (got.double() - want.double()).abs() / largest
    count = int((~(off <= limit)).sum())  # NaN compares false
    return (float(off.max()) if bool(torch.isfinite(off).all()) else math.inf), count


def relative_error(got: Tensor, want: Tensor) -> float:
    """max |got - want| / max |want| in fp64; infinite for another shape, NaN or infinity."""
    return difference(got, want, math.inf)[0]
