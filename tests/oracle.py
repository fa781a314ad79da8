"""What a right answer is: unsharded torch in fp64, and how far from it an op may be.

The bound, and which norm carries it. Let ``exact`` be the unsharded op in fp64 on the very same (rounded)
inputs, and ``same`` the unsharded torch op in the dtype under test. The error of ours may be 1.5 x the
error of ``same``.

* The relative Frobenius norm carries the factor 1.5. It averages over all elements, so for a few hundred
  elements the error of two sound summation orders agrees within some per cent, and 1.5 separates one
  extra rounding in the middle (sqrt(2), allowed: partial sums cross ranks in the dtype and are summed in
  fp32) from sums kept in the dtype (more).
* The largest absolute error is an extreme value: it differs by 2 x between two sound orders. It is held
  to ``MAX_FACTOR`` only, and is there for the one wrong element in a large tensor that the Frobenius norm
  does not see.
* Small tensors: torch may hit the exact value of a single element. One correctly rounded result may be
  wrong by the unit roundoff u, so that is always allowed for one element, and less for more elements, as
  u * 8 / sqrt(n): from about 500 elements on this is below the error of correct rounding (0.4 u) and only
  the factor 1.5 counts. Both errors are samples of n values, and the ratio of two such norms scatters by
  1 / sqrt(n): below 500 elements 2 / sqrt(n) is added to the factor (24 sums of 64 numbers by torch itself,
  in two layouts, were seen 1.51 x apart).
* fp32 must also be within 1e-5 relative, whatever torch does. fp64 has no more exact oracle here: 1e-13.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F

FACTOR = 1.5
MAX_FACTOR = 4.0
SMALL = 500  # elements
FP32_LIMIT = 1e-5
FP64_LIMIT = 1e-13


@dataclasses.dataclass(frozen=True)
class Linear:
    """Output and gradients of one unsharded linear layer."""

    out: torch.Tensor
    grad_x: torch.Tensor
    grad_weight: torch.Tensor
    grad_bias: torch.Tensor | None


def unsharded_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    grad_out: torch.Tensor,
    dtype: torch.dtype,
) -> Linear:
    """F.linear and its gradients in ``dtype`` on one process. x [..., K], weight [N, K], bias [N],
    grad_out [..., N]."""
    leaves = [t.detach().to(dtype).contiguous().requires_grad_() for t in (x, weight, bias) if t is not None]
    out = F.linear(*leaves)
    grads = torch.autograd.grad(out, leaves, grad_out.detach().to(dtype).contiguous())
    return Linear(out.detach(), grads[0], grads[1], grads[2] if bias is not None else None)


@dataclasses.dataclass(frozen=True)
class Error:
    """Distance to the exact result: Frobenius norm relative to it, and the largest absolute difference."""

    relative: float
    largest: float

    def __str__(self) -> str:
        return f"relative {self.relative:.3e}, largest {self.largest:.3e}"


def error(value: torch.Tensor, exact: torch.Tensor) -> Error:
    """NaN and infinity count as an infinite error."""
    if exact.numel() == 0:
        return Error(0.0, 0.0)
    difference = value.detach().double() - exact
    norm, scale = difference.norm().item(), exact.norm().item()
    relative = norm / scale if scale else (0.0 if norm == 0 else float("inf"))
    largest = difference.abs().max().item()
    return Error(_or_infinite(relative), _or_infinite(largest))


def _or_infinite(value: float) -> float:
    return value if value == value else float("inf")


def limits(exact: torch.Tensor, same: torch.Tensor) -> Error:
    """The largest error that is allowed, by the rule at the top of this file."""
    if same.dtype == torch.float64:
        return Error(FP64_LIMIT, FP64_LIMIT * (exact.abs().max().item() if exact.numel() else 0.0) * 10)
    theirs = error(same, exact)
    roundoff = torch.finfo(same.dtype).eps / 2
    count = max(exact.numel(), 1)
    factor = FACTOR * (1 + 2 / count**0.5 if count < SMALL else 1)
    relative = max(factor * theirs.relative, roundoff * min(1.0, 8 / count**0.5))
    if same.dtype == torch.float32:
        relative = min(relative, FP32_LIMIT)
    peak = exact.abs().max().item() if exact.numel() else 0.0
    return Error(relative, max(MAX_FACTOR * theirs.largest, 2 * roundoff * peak))


def check_close(what: str, ours: torch.Tensor, exact: torch.Tensor, same: torch.Tensor) -> None:
    """ours against the fp64 result ``exact``, judged by the same-dtype unsharded result ``same``."""
    check_like(what, ours, same)
    found, allowed = error(ours, exact), limits(exact, same)
    if found.relative > allowed.relative or found.largest > allowed.largest:
        raise AssertionError(
            f"{what}: error {found}; unsharded torch in {same.dtype}: {error(same, exact)}; allowed: {allowed}"
        )


def check_equal(what: str, ours: torch.Tensor, expected: torch.Tensor) -> None:
    """Element by element equal; for inputs that sum exactly. ``expected`` may be of a wider dtype."""
    if ours.shape != expected.shape:
        raise AssertionError(f"{what}: shape {tuple(ours.shape)}, expected {tuple(expected.shape)}")
    wrong = ours.detach().to(expected.dtype) != expected
    if wrong.any():
        where = wrong.nonzero()
        raise AssertionError(
            f"{what}: {len(where)} of {wrong.numel()} elements differ, first at {where[0].tolist()}: "
            f"{ours[tuple(where[0])].item()} instead of {expected[tuple(where[0])].item()}"
        )


def check_like(what: str, ours: torch.Tensor, same: torch.Tensor) -> None:
    if ours.shape != same.shape or ours.dtype != same.dtype:
        raise AssertionError(
            f"{what}: {ours.dtype} {tuple(ours.shape)}, expected {same.dtype} {tuple(same.shape)}"
        )


def check_bitwise(what: str, first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> None:
    """Two runs of the same call: equal in every bit, NaN included."""
    for index, (a, b) in enumerate(zip(first, second, strict=True)):
        if digest(a) != digest(b):
            raise AssertionError(
                f"{what}: tensor {index} differs between two runs, by {error(a, b.double())}"
            )


def check_same_on_all_ranks(what: str, value: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """A replicated result is bitwise the same everywhere. Collective."""
    digests: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(digests, digest(value), group=group)
    if len(set(digests)) != 1:
        raise AssertionError(f"{what}: ranks hold different bits: {digests}")


def digest(value: torch.Tensor) -> str:
    data = value.detach().contiguous().reshape(-1).view(torch.uint8)
    return f"{tuple(value.shape)} {hashlib.sha1(data.numpy().tobytes()).hexdigest()[:12]}"


# ---- inputs --------------------------------------------------------------------------------------------------------


def chunk_sizes(size: int, parts: int) -> list[int]:
    """torch.chunk's convention with the empty parts written out: ceil(size / parts) each, last ones
    shorter or empty."""
    step = -(-size // parts)
    return [max(0, min(step, size - step * part)) for part in range(parts)]


def chunk(x: torch.Tensor, dim: int, index: int, parts: int) -> torch.Tensor:
    """Part ``index`` of ``x`` along ``dim`` in that convention."""
    sizes = chunk_sizes(x.shape[dim], parts)
    return x.narrow(dim, sum(sizes[:index]), sizes[index])


def split_sizes(size: int, parts: int) -> list[int]:
    """Another uneven split, for dims that only this rank sees (its own rows or columns of a weight)."""
    return [size // parts + (part < size % parts) for part in range(parts)]


def integers(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """-1, 0, 1: sums over a thousand products stay far below 256, where bf16 stops counting by ones."""
    return torch.randint(-1, 2, tuple(shape), generator=generator).to(dtype)


def normals(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=generator).to(dtype)


def contiguous(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous()


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.dim() > 1 else x


def sliced(x: torch.Tensor) -> torch.Tensor:
    """Columns 3.. of a wider tensor that holds NaN elsewhere."""
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 8), float("nan"))
    wide[..., 3 : 3 + x.shape[-1]] = x
    return wide[..., 3 : 3 + x.shape[-1]]


def every_other_row(x: torch.Tensor) -> torch.Tensor:
    """Rows 0, 2, 4.. of a taller tensor that holds NaN elsewhere."""
    tall = x.new_full((2 * x.shape[0], *x.shape[1:]), float("nan"))
    tall[::2] = x
    return tall[::2]


def every_other_column(x: torch.Tensor) -> torch.Tensor:
    """Innermost stride 2."""
    wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"))
    wide[..., ::2] = x
    return wide[..., ::2]


def offset(x: torch.Tensor) -> torch.Tensor:
    """Contiguous, but one element into its storage: no alignment beyond that of an element."""
    flat = x.new_full((x.numel() + 1,), float("nan"))
    flat[1:] = x.reshape(-1)
    return flat[1:].view(x.shape)


def expanded(x: torch.Tensor) -> torch.Tensor:
    """The first row for all rows, stride 0."""
    return x[:1].expand(x.shape) if x.shape[0] else x


def one_value(x: torch.Tensor) -> torch.Tensor:
    """One value for all elements, all strides 0: what ``out.sum()`` sends backward."""
    return x.reshape(-1)[:1].view(*[1] * x.dim()).expand(x.shape) if x.numel() else x


LAYOUTS = {
    f.__name__: f
    for f in (
        contiguous,
        transposed,
        sliced,
        every_other_row,
        every_other_column,
        offset,
        expanded,
        one_value,
    )
}


@contextmanager
def poisoned(largest: int = 1 << 20) -> Iterator[None]:
    """Memory is NaN until written: torch.empty is filled, and freed blocks of many sizes hold NaN when
    reused."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)  # this is what makes torch.empty write NaN
    dirty_allocator(largest)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def dirty_allocator(largest: int = 1 << 20) -> None:
    """Freed blocks of 64 bytes to 4 * ``largest`` bytes that hold NaN, for scratch that does not come
    from torch."""
    blocks = []
    numel = 16
    while numel <= largest:
        blocks += [torch.full((numel,), float("nan")) for _ in range(3)]
        numel *= 4
    del blocks
