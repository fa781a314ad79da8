"""One call of each parallel linear, forward and backward, checked against the unsharded layer.

Every rank builds the data of all ranks from a shared seed, so that it can compute the unsharded layer by
itself and still holds data that no other rank holds. ``OPS[name](case, group)`` runs the op once and
returns output and gradients; ``check(name, case, group)`` compares them with the oracle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import interlace
import interlace.functional as il
from tests import oracle

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes are those of the unsharded layer: x [*lead, k], weight [n, k]."""

    lead: tuple[int, ...]
    k: int
    n: int
    dtype: torch.dtype = torch.float32
    dim: int = 0  # gathered or scattered, may be negative; the last one is k (gather) or n (scatter)
    bias: bool = True
    exact: bool = (
        True  # small integers, compared with ==; else normal numbers, compared by the bound of the oracle
    )
    x_layout: str = "contiguous"
    weight_layout: str = "contiguous"
    grad_layout: str = "contiguous"
    frozen: bool = False  # the weight needs no gradient
    packed: bool = False  # a frozen weight in the layout of the tile engine
    weights: int = 1  # products of one gather
    seed: int = 0
    give_size: bool = True  # tell the op the total length of an uneven gather


@dataclasses.dataclass
class Local:
    """What one rank passes to the op, and what the unsharded layer is made of."""

    x: Tensor
    weights: list[Tensor]
    biases: list[Tensor | None]
    grad_outs: list[Tensor]
    whole_x: Tensor
    whole_weight: Tensor
    whole_bias: Tensor | None
    whole_grad: Tensor
    own_out: Callable[[Tensor], list[Tensor]]  # of the unsharded output: what this rank's call returns
    own_x: Callable[[Tensor], Tensor]  # of the unsharded grad_x, grad_weight, grad_bias: this rank's
    own_weight: Callable[[Tensor], list[Tensor]]
    own_bias: Callable[[Tensor], list[Tensor]]


@dataclasses.dataclass
class Result:
    outs: list[Tensor]
    grad_x: Tensor
    grad_weights: list[Tensor]
    grad_biases: list[Tensor]

    def tensors(self) -> list[Tensor]:
        return [*self.outs, self.grad_x, *self.grad_weights, *self.grad_biases]


class _Maker:
    """Draws tensors in one order on all ranks."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.generator = torch.Generator().manual_seed(77 + case.seed)

    def __call__(self, *shape: int, layout: str = "contiguous") -> Tensor:
        draw = oracle.integers if self.case.exact else oracle.normals
        return oracle.LAYOUTS[layout](draw(shape, self.case.dtype, self.generator))

    def bias(self, n: int) -> Tensor | None:
        return self(n) if self.case.bias else None


def _cat(parts: list[Tensor], dim: int) -> Tensor:
    return torch.cat([part.contiguous() for part in parts], dim)


def _bounds(sizes: list[int], rank: int) -> slice:
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def _columns(
    case: Case, rank: int, world_size: int, make: _Maker
) -> tuple[list[list[Tensor]], list[list[Tensor | None]], list[slice]]:
    """Weights and biases [weight][rank] of a layer whose rows of W are cut, and this rank's rows in the
    whole."""
    sizes = oracle.split_sizes(case.n, world_size)
    weights = [[make(n, case.k, layout=case.weight_layout) for n in sizes] for _ in range(case.weights)]
    biases = [[make.bias(n) for n in sizes] for _ in range(case.weights)]
    own = _bounds(sizes, rank)
    return (
        weights,
        biases,
        [slice(i * case.n + own.start, i * case.n + own.stop) for i in range(case.weights)],
    )


def _column_parts(
    case: Case,
    rank: int,
    world_size: int,
    make: _Maker,
    x: Tensor,
    whole_x: Tensor,
    own_x: Callable[[Tensor], Tensor],
) -> Local:
    weights, biases, rows = _columns(case, rank, world_size, make)
    sizes = oracle.split_sizes(case.n, world_size)
    grads = [[make(*case.lead, n, layout=case.grad_layout) for n in sizes] for _ in range(case.weights)]
    flat_biases = [b for bs in biases for b in bs]
    return Local(
        x=x,
        weights=[ws[rank] for ws in weights],
        biases=[bs[rank] for bs in biases],
        grad_outs=[gs[rank] for gs in grads],
        whole_x=whole_x,
        whole_weight=_cat([w for ws in weights for w in ws], 0),
        whole_bias=_cat(flat_biases, 0) if case.bias else None,
        whole_grad=_cat([g for gs in grads for g in gs], -1),
        own_out=lambda out: [out[..., r] for r in rows],
        own_x=own_x,
        own_weight=lambda grad: [grad[r] for r in rows],
        own_bias=lambda grad: [grad[r] for r in rows],
    )


def gather_parts(case: Case, rank: int, world_size: int) -> Local:
    """x cut along case.dim, rows of the weights cut."""
    make = _Maker(case)
    whole = (*case.lead, case.k)
    sizes = oracle.chunk_sizes(whole[case.dim], world_size)
    shards = []
    for size in sizes:
        shape = list(whole)
        shape[case.dim] = size
        shards.append(make(*shape, layout=case.x_layout))
    whole_x = _cat(shards, case.dim)
    return _column_parts(
        case,
        rank,
        world_size,
        make,
        shards[rank],
        whole_x,
        lambda g: oracle.chunk(g, case.dim, rank, world_size),
    )


def column_parts(case: Case, rank: int, world_size: int) -> Local:
    """x replicated, rows of the weights cut."""
    make = _Maker(case)
    x = make(*case.lead, case.k, layout=case.x_layout)
    return _column_parts(case, rank, world_size, make, x, x, lambda g: g)


def _row_parts(case: Case, rank: int, world_size: int, scattered: bool) -> Local:
    """Columns of x and weight cut; the output is whole on all ranks, or cut along case.dim."""
    make = _Maker(case)
    sizes = oracle.split_sizes(case.k, world_size)
    xs = [make(*case.lead, k, layout=case.x_layout) for k in sizes]
    weights = [make(case.n, k, layout=case.weight_layout) for k in sizes]
    bias = make.bias(case.n)
    own = _bounds(sizes, rank)
    shape = [*case.lead, case.n]
    if scattered:
        grads = []
        for size in oracle.chunk_sizes(shape[case.dim], world_size):
            shape[case.dim] = size
            grads.append(make(*shape, layout=case.grad_layout))
        grad, whole_grad = grads[rank], _cat(grads, case.dim)
    else:
        grad = whole_grad = make(*shape, layout=case.grad_layout)

    def own_out(out: Tensor) -> list[Tensor]:
        return [oracle.chunk(out, case.dim, rank, world_size) if scattered else out]

    return Local(
        x=xs[rank], weights=[weights[rank]], biases=[bias], grad_outs=[grad],
        whole_x=_cat(xs, -1), whole_weight=_cat(weights, 1), whole_bias=bias, whole_grad=whole_grad,
        own_out=own_out, own_x=lambda g: g[..., own], own_weight=lambda g: [g[:, own]], own_bias=lambda g: [g],
    )  # fmt: skip


def scatter_parts(case: Case, rank: int, world_size: int) -> Local:
    return _row_parts(case, rank, world_size, scattered=True)


def reduce_parts(case: Case, rank: int, world_size: int) -> Local:
    return _row_parts(case, rank, world_size, scattered=False)


def _weights(weights: list[Tensor]) -> Tensor | list[Tensor]:
    return weights[0] if len(weights) == 1 else weights


def _as_list(outs: Tensor | list[Tensor]) -> list[Tensor]:
    return [outs] if isinstance(outs, Tensor) else list(outs)


def all_gather_linear(x, weights, biases, case, group):
    size = (*case.lead, case.k)[case.dim] if case.give_size else None
    w, b = _weights(weights), _weights(biases)
    return _as_list(il.all_gather_linear(x, w, b, group=group, gather_dim=case.dim, gather_size=size))


def column_linear(x, weights, biases, case, group):
    return _as_list(il.column_linear(x, _weights(weights), _weights(biases), group=group))


def linear_reduce_scatter(x, weights, biases, case, group):
    return [il.linear_reduce_scatter(x, weights[0], biases[0], group=group, scatter_dim=case.dim)]


def linear_all_reduce(x, weights, biases, case, group):
    return [il.linear_all_reduce(x, weights[0], biases[0], group=group)]


OPS = {
    "all_gather_linear": (gather_parts, all_gather_linear),
    "column_linear": (column_parts, column_linear),
    "linear_reduce_scatter": (scatter_parts, linear_reduce_scatter),
    "linear_all_reduce": (reduce_parts, linear_all_reduce),
}


def has_tiles(dtype: torch.dtype) -> bool:
    """Whether this machine, under the cap of its instruction set, multiplies packed weights of the dtype."""
    _, float32_tiles, bfloat16_tiles, _ = torch.ops.interlace.engine_info()
    return {torch.float32: float32_tiles, torch.bfloat16: bfloat16_tiles}[dtype]


def forward_backward(name: str, case: Case, local: Local, group: dist.ProcessGroup | None) -> Result:
    """Calls the op on fresh leaves with the layouts of the case."""
    leaves = [local.x, *([] if case.frozen else local.weights), *(b for b in local.biases if b is not None)]
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    x, rest = leaves[0], leaves[1:]
    count = len(local.weights)
    weights = [w.detach() for w in local.weights] if case.frozen else rest[:count]
    if case.packed and has_tiles(case.dtype):
        weights = [interlace.PackedWeight.pack(w) for w in weights]
    biases = rest[-count:] if case.bias else [None] * count
    outs = OPS[name][1](x, weights, biases, case, group)
    grads = list(torch.autograd.grad(outs, leaves, local.grad_outs))
    grad_weights = [] if case.frozen else grads[1 : 1 + count]
    return Result([o.detach() for o in outs], grads[0], grad_weights, grads[-count:] if case.bias else [])


def run(name: str, case: Case, group: dist.ProcessGroup | None = None) -> tuple[Local, Result]:
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    local = OPS[name][0](case, rank, world_size)
    oracle.dirty_allocator(1 << 16)
    return local, forward_backward(name, case, local, group)


def check(name: str, case: Case, group: dist.ProcessGroup | None = None) -> Result:
    """Runs the op once; output and all gradients must be the unsharded layer's."""
    local, result = run(name, case, group)
    compare(f"{name} {case}", case, local, result)
    return result


def compare(what: str, case: Case, local: Local, result: Result) -> None:
    whole = (local.whole_x, local.whole_weight, local.whole_bias, local.whole_grad)
    exact = _parts(local, oracle.unsharded_linear(*whole, torch.float64), case)
    if case.exact:
        for (part, expected), ours in zip(exact, result.tensors(), strict=True):
            oracle.check_equal(f"{what}: {part}", ours, expected)
            if ours.dtype != case.dtype:
                raise AssertionError(f"{what}: {part} is {ours.dtype}")
        return
    same = _parts(local, oracle.unsharded_linear(*whole, case.dtype), case)
    for (part, expected), (_, torch_result), ours in zip(exact, same, result.tensors(), strict=True):
        oracle.check_close(f"{what}: {part}", ours, expected, torch_result)


def _parts(local: Local, whole: oracle.Linear, case: Case) -> list[tuple[str, Tensor]]:
    """This rank's share of the unsharded result, in the order of Result.tensors."""
    parts = [("out", t) for t in local.own_out(whole.out)] + [("grad_x", local.own_x(whole.grad_x))]
    if not case.frozen:
        parts += [("grad_weight", t) for t in local.own_weight(whole.grad_weight)]
    if whole.grad_bias is not None:
        parts += [("grad_bias", t) for t in local.own_bias(whole.grad_bias)]
    return parts
