"""The ops as the dispatcher, torch.compile and the user's choice of path see them."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import interlace
import interlace.functional as il
from tests import oracle
from tests.distributed import run_distributed
from tests.ops.linears import OPS, Case, run

ops = torch.ops.interlace
WORLDS = (2, 3)
CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
    "test_aot_dispatch_dynamic",
)
PREFIX = "interlace::"
SETTINGS = {"cap_isa", "choose", "engine_info"}


def samples(
    world_size: int, name: str, dtype: torch.dtype
) -> Iterator[tuple[Callable[..., object], tuple[object, ...]]]:
    """Arguments of every op, with transposed inputs, with and without bias and gradient."""

    def x(*shape: int, grad: bool = True) -> Tensor:
        return oracle.transposed(torch.randn(shape, dtype=dtype)).requires_grad_(grad)

    weight, bias = x(49, 12), torch.randn(49, dtype=dtype, requires_grad=True)
    short = x(12, 49)
    yield ops.all_gather_gemm, (x(3, 12), [weight, x(5, 12)], [bias, None], 0, name, False)
    yield ops.all_gather_gemm, (x(2, 3, 12, grad=False), [weight], [None], 1, name, True)
    yield ops.gemm_reduce_scatter, (x(7, 12), weight, bias, 0, name)
    yield ops.gemm_reduce_scatter, (x(2, 7, 12), weight, None, -2, name)
    yield ops.gemm_all_reduce, (x(7, 12), weight, bias, name)
    yield ops.gemm_all_reduce, (x(2, 7, 49, grad=False), short, None, name)
    yield ops.column_gemm, (x(7, 12), [weight, x(5, 12)], [bias, None], name)
    yield (
        ops.sum_gemm_reduce_scatter,
        ([x(7, 12, grad=False)] * 2, [weight.detach(), weight.detach()], 0, name),
    )
    yield ops.sum_gemm_all_reduce, ([x(7, 12, grad=False)] * 2, [weight.detach(), weight.detach()], name)
    yield ops.all_reduce, (x(7, 5), name)
    yield ops.all_gather, (x(7, 5), 1, name)
    yield ops.reduce_scatter, (x(7, 5), 0, name)
    yield ops.all_to_all, (x(2 * world_size, 5), None, None, name)
    yield from norm_samples(world_size, name, dtype)
    yield from attention_samples(world_size, name, dtype)
    yield ops.pack_weight, (x(49, 12, grad=False),)
    yield ops.unpack_weight, (ops.pack_weight(x(49, 12, grad=False)), 49, 12)


def norm_samples(
    world_size: int, name: str, dtype: torch.dtype
) -> Iterator[tuple[Callable[..., object], tuple[object, ...]]]:
    """The same of the ops with a norm behind their sum, and of those of fp8 tensors (forward only)."""

    def x(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, requires_grad=True)

    def quantised(*shape: int) -> Tensor:
        return torch.randn(shape).to(torch.float8_e4m3fn)

    rows = oracle.chunk_sizes(7, world_size)[dist.get_rank()]
    yield ops.gemm_all_reduce_norm, (x(2, 7, 12), x(9, 12), x(9), x(2, 7, 9), x(9), 1e-5, name)
    yield ops.gemm_reduce_scatter_norm, (x(2, 7, 12), x(9, 12), None, x(2, rows, 9), x(9), 1e-5, 1, name)
    one, by_row = torch.ones(1), torch.rand(4, 1)
    weights, scales = [quantised(9, 16), quantised(5, 16)], [torch.rand(9), one]
    bias = torch.randn(9, dtype=dtype)
    yield (
        ops.all_gather_gemm_scaled,
        (quantised(4, 16), by_row, weights, scales, [bias, None], dtype, 0, name),
    )
    yield (
        ops.gemm_reduce_scatter_scaled,
        (quantised(7, 16), one, weights[0], scales[0], bias, dtype, 0, name),
    )


def attention_samples(
    world_size: int, name: str, dtype: torch.dtype
) -> Iterator[tuple[Callable[..., object], tuple[object, ...]]]:
    """The same of attention over a split sequence, and of the exchange of features for tokens."""
    q, k, v = (torch.randn(1, heads, 4, 8, dtype=dtype, requires_grad=True) for heads in (4, 2, 2))
    options = ("ring_attention", "ring", True, None, "zigzag", None, None, 1, name)
    yield ops.context_attention, (q, k, v, *options)
    whole = tuple(t.detach() for t in (q, k, v))
    out, lse = ops.context_attention(*whole, *options)
    yield ops.context_attention_backward, (torch.randn_like(out), *whole, out, lse, *options)
    features = [bound for rank in range(world_size) for bound in (3 * rank, 3 * rank + 3)]
    total = 3 * world_size
    x, part, weight = (torch.randn(shape, dtype=dtype) for shape in ((2, 3, 12), (2, total, 3), (total, 12)))
    yield ops.gemm_all_to_all, (x, [weight], [None], features, name)
    yield ops.exchange_features, ([part], features, [total], name)
    yield ops.all_to_all_gemm, (part, torch.randn(5, total, dtype=dtype), None, features, name)


def leaves_its_inputs(op: Callable[..., object], args: tuple[object, ...]) -> str:
    """SUCCESS when the bytes of all tensors are the same after a call."""
    flat = [t for a in args for t in (a if isinstance(a, list) else [a]) if isinstance(t, Tensor)]
    before = [t.detach().contiguous().view(torch.uint8).clone() for t in flat]
    op(*args)
    same = all(
        torch.equal(t.detach().contiguous().view(torch.uint8), b) for t, b in zip(flat, before, strict=True)
    )
    return "SUCCESS" if same else "an input was changed"


def opcheck_all(rank: int, world_size: int) -> dict[str, int]:
    """Passed checks per op; raises when one fails."""
    passed: dict[str, int] = {}
    name = interlace.resolve(None).name
    for dtype in (torch.float32, torch.bfloat16):
        for op, args in samples(world_size, name, dtype):
            scaled = args[0].dtype is torch.float8_e4m3fn if isinstance(args[0], Tensor) else False
            # torch compares no fp8 tensors: what test_schema asks, whether inputs stay as they are, is asked below
            checks = CHECKS[1:] if scaled else CHECKS
            results = torch.library.opcheck(
                op, args, test_utils=checks, raise_exception=False, atol=1e-2, rtol=1e-2
            )
            if scaled:
                results["test_schema"] = leaves_its_inputs(op, args)
            bad = {check: str(why)[:400] for check, why in results.items() if why != "SUCCESS"}
            if bad:
                raise AssertionError(f"{op} in {dtype}: {bad}")
            passed[str(op)] = max(passed.get(str(op), 0), len(results))
    return passed


@pytest.mark.slow
@pytest.mark.parametrize("world_size", WORLDS)
def test_opcheck_passes_for_every_op(world_size: int) -> None:
    """Catches a fake with other shapes or strides than the op, a mutated input, a gradient unknown to the
    dispatcher."""
    for passed in run_distributed(world_size, opcheck_all, timeout=240):
        names = {
            name.split("::")[1].split(".")[0]
            for name in torch._C._dispatch_get_all_op_names()
            if PREFIX in name
        }
        # a twin on torch.distributed has the schema and fake of its op; the settings take and return no tensor;
        # _device_* are launches of kernels, not ops of models
        registered = {
            n for n in names if not n.endswith(("_reference", "_decomposed")) and n[0] != "_"
        } - SETTINGS
        assert {name.split(".")[-1] for name in passed} == registered
        assert set(passed.values()) == {len(CHECKS)}


def block(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    """Every functional once, as a transformer block would use them; x [S_r, 12] is this rank's rows."""
    q, k = il.all_gather_linear(x, weights[:2], biases[:2], group=None)
    hidden = torch.relu(q * k)
    rows = il.linear_reduce_scatter(hidden, weights[2], biases[2], group=None)
    whole = il.gather_from_region(rows + x, group=None, dim=0)
    up = il.column_linear(whole, weights[3], biases[3], group=None)
    down = il.linear_all_reduce(torch.tanh(up), weights[4], biases[4], group=None)
    return il.scatter_to_region(down, group=None, dim=0) + il.all_reduce(rows, group=None) / 4


def block_parameters(world_size: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    shapes = [(49, 12), (49, 12), (12, 49), (7, 12), (12, 7)]
    weights = [torch.randn(s, dtype=dtype) / s[1] ** 0.5 for s in shapes]
    biases = [torch.randn(s[0], dtype=dtype) for s in shapes]
    for bias in (biases[2], biases[4]):
        dist.broadcast(bias, 0)  # the bias of a reduced op is replicated
    return [w.requires_grad_() for w in weights], [b.requires_grad_() for b in biases]


def compiled_block(rank: int, world_size: int, backend: str, dynamic: bool, sizes: list[int]) -> int:
    torch._dynamo.reset()
    compiled_frames = 0

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        nonlocal compiled_frames
        compiled_frames += 1
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic, backend=count)
    weights, biases = block_parameters(world_size, torch.float32)
    leaves = [*weights, *biases]
    for rows in sizes:
        results = []
        x = torch.randn(rows, 12)
        for function in (block, compiled):
            leaf = x.clone().requires_grad_()
            out = function(leaf, weights, biases)
            results.append((out, *torch.autograd.grad(out.square().sum(), [leaf, *leaves])))
        for index, (eager, other) in enumerate(zip(*results, strict=True)):
            torch.testing.assert_close(
                other, eager, rtol=1e-4, atol=1e-4, msg=lambda m, i=index, r=rows: f"{r} rows, {i}: {m}"
            )
            if other.stride() != eager.stride():
                raise AssertionError(
                    f"{rows} rows, tensor {index}: strides {other.stride()}, eager {eager.stride()}"
                )
    dist.barrier()
    return compiled_frames


@pytest.mark.slow
@pytest.mark.parametrize(("dynamic", "sizes"), [(False, [8, 5]), (True, [8, 5, 33, 70])])
def test_compiles_without_graph_breaks(dynamic: bool, sizes: list[int]) -> None:
    """Catches a process group in a schema, a fake that guesses, and a shape that is burnt into the graph."""
    frames = run_distributed(2, compiled_block, "aot_eager", dynamic, sizes, timeout=240)
    assert frames == [1 if dynamic else len(sizes)] * 2


@pytest.mark.slow
def test_inductor_runs_the_ops() -> None:
    """Catches an op whose outputs Inductor gives other strides or reuses the memory of."""
    assert run_distributed(2, compiled_block, "inductor", False, [8], timeout=400) == [1, 1]


def paths(rank: int, world_size: int) -> dict[str, list[tuple[str, bool, str]]]:
    """(op, fused, reason) of every linear under each backend."""
    seen: dict[str, list[tuple[str, bool, str]]] = {}
    for backend in ("auto", "fused", "reference"):
        with interlace.backend(backend):
            for name in OPS:
                for dtype in (torch.float32, torch.bfloat16):
                    for m in (3, 200):
                        run(name, Case((m,), 64, 48, dtype))
                        path = interlace.last_path()
                        seen.setdefault(f"{backend} {name}", []).append((path.op, path.fused, path.reason))
    return seen


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_fused_path_runs_unless_the_user_says_reference(world_size: int) -> None:
    """Catches a suite that tests the fallback only, and users who are slower without being told."""
    for seen in run_distributed(world_size, paths):
        for key, entries in seen.items():
            assert all(reason for _, _, reason in entries), (key, entries)
            assert [fused for _, fused, _ in entries] == ["reference" not in key] * len(entries), (
                key,
                entries,
            )


def last_op(rank: int, world_size: int) -> list[str]:
    x, weight = torch.ones(4, 8), torch.ones(6, 8)
    names = []
    with torch.no_grad():
        for call in (
            lambda: il.all_gather_linear(x, weight, group=None),
            lambda: il.linear_reduce_scatter(x, weight, group=None),
            lambda: il.linear_all_reduce(x, weight, group=None),
            lambda: il.all_reduce(x, group=None),
            lambda: il.all_gather(x, group=None),
            lambda: il.reduce_scatter(x, group=None),
        ):
            call()
            path = interlace.last_path()
            names.append(path.op)
            if not path.algorithm or not path.reason:
                raise AssertionError(f"{path}: algorithm and reason must be told")
    return names


@pytest.mark.parametrize("world_size", [2, 4])
def test_last_path_names_the_op(world_size: int) -> None:
    """Catches a report of some other call."""
    expected = [
        "all_gather_gemm",
        "gemm_reduce_scatter",
        "gemm_all_reduce",
        "all_reduce",
        "all_gather",
        "reduce_scatter",
    ]
    assert run_distributed(world_size, last_op) == [expected] * world_size


def refused_by_fused(rank: int, world_size: int) -> str:
    """fp64 has no fused kernel."""
    x, weight = torch.ones(4, 8, dtype=torch.float64), torch.ones(6, 8, dtype=torch.float64)
    out = il.linear_all_reduce(x, weight, group=None)
    if interlace.last_path().fused:
        return "fused"
    with interlace.backend("fused"):
        try:
            il.linear_all_reduce(x, weight, group=None)
        except (ValueError, TypeError, RuntimeError) as error:
            again = il.all_reduce(out, group=None)  # the group still works
            oracle.check_equal("all_reduce after the refusal", again, out * world_size)
            return f"{type(error).__name__}: {error}"
    return "accepted"


@pytest.mark.parametrize("world_size", [2, 3])
def test_backend_fused_refuses_what_it_cannot_fuse(world_size: int) -> None:
    """Catches a silent fallback under a setting that promises none."""
    for answer in run_distributed(world_size, refused_by_fused):
        assert answer == "fused" or ("float64" in answer and "gemm_all_reduce" in answer), answer


def nested(rank: int, world_size: int) -> list[bool]:
    seen = []
    x = torch.ones(4)
    with interlace.backend("reference"):
        il.all_reduce(x, group=None)
        seen.append(interlace.last_path().fused)
        with interlace.backend("auto"):
            il.all_reduce(x, group=None)
            seen.append(interlace.last_path().fused)
        with contextlib.suppress(KeyError), interlace.backend("fused"):
            raise KeyError
        il.all_reduce(x, group=None)
        seen.append(interlace.last_path().fused)
    return seen


def test_backend_contexts_nest_and_end_with_an_exception() -> None:
    """Catches a setting that leaks out of its context."""
    assert run_distributed(2, nested) == [[False, True, False]] * 2
    with pytest.raises(ValueError, match="fastest"), interlace.backend("fastest"):
        pass


def _prints_choices(rank: int, world_size: int) -> str:
    with tempfile.TemporaryFile() as captured:
        saved = os.dup(2)
        os.dup2(captured.fileno(), 2)
        try:
            for _ in range(3):
                interlace.functional.all_reduce(torch.ones(4), group=None)
        finally:
            os.dup2(saved, 2)
            os.close(saved)
        captured.seek(0)
        return captured.read().decode()


def test_each_new_choice_is_printed_once_when_asked_for() -> None:
    """INTERLACE_PRINT_CONFIG=1: one line a rank for three equal calls. Catches a line per call, and none."""
    for text in run_distributed(2, _prints_choices, env={"INTERLACE_PRINT_CONFIG": "1"}):
        assert text.count(": all_reduce: one_shot") == 1
