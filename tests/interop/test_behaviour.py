"""Split models and layers under everyday PyTorch: checkpointing, freezing, sharing, strides, second derivatives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.attention
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import interlace
from interlace.modules import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelMLP,
    RowParallelLinear,
    SummedGradients,
)
from interlace.modules.layout import layouts_of
from interlace.parallelize import parallelize
from tests.distributed import run_distributed
from tests.interop.models import assert_parameters_near, ids, llama, loss_of, train
from tests.parallelize.models import assert_near

F64 = torch.float64


@contextmanager
def counted() -> Iterator[list[str]]:
    """Names of our ops and of torch's products, in the order of their calls."""

    class Counter(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: object, types: object, args: tuple = (), kwargs: dict | None = None
        ) -> object:
            if func.namespace == "interlace" or func._opname in ("mm", "bmm", "addmm"):
                seen.append(func._opname)
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    with Counter():
        yield seen


def _draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def _selective(rank: int, world_size: int, sequence_parallel: bool) -> dict[str, list[str]]:
    torch.manual_seed(0)
    mlp = ParallelMLP(6, 10, gated=True, activation="silu", dtype=F64, sequence_parallel=sequence_parallel)
    x = _draw(4, 6, seed=rank).requires_grad_() if sequence_parallel else _draw(4, 6).requires_grad_()
    ops = torch.ops.interlace
    kept = (ops.gemm_all_reduce.default, ops.gemm_reduce_scatter.default)

    def policy(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> tuple[object, object]:
        return create_selective_checkpoint_contexts(policy)

    ways: dict[str, Callable[[], Tensor]] = {
        "none": lambda: mlp(x),
        "reentrant": lambda: checkpoint(mlp, x, use_reentrant=True),
        "whole": lambda: checkpoint(mlp, x, use_reentrant=False),
        "selective": lambda: checkpoint(mlp, x, use_reentrant=False, context_fn=contexts),
    }
    calls, grads = {}, {}
    for name, way in ways.items():
        mlp.zero_grad()
        x.grad = None
        out = way()
        with counted() as seen:
            out.backward(_draw(*out.shape, seed=3))
        calls[name] = [op for op in seen if op not in ("mm", "column_gemm")]
        grads[name] = [x.grad, *(param.grad for param in mlp.parameters())]
        assert all(torch.equal(a, b) for a, b in zip(grads["none"], grads[name], strict=True)), name
    return calls


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_selective_policy_keeps_the_result_of_the_collective(sequence_parallel: bool) -> None:
    """Recomputing a block must not pay for its sum over the ranks again when the policy says to keep it."""
    for calls in run_distributed(2, _selective, sequence_parallel):
        once = ["gemm_all_reduce"] if not sequence_parallel else ["all_gather_gemm", "gemm_reduce_scatter"]
        kept = once[:-1]  # the gather of the columns is recomputed, the sum of the row is not
        for name in ("reentrant", "whole"):
            assert sorted(calls[name]) == sorted(calls["none"] + once), name
        assert sorted(calls["selective"]) == sorted(calls["none"] + kept)


def _sequence(rank: int, world_size: int) -> None:
    whole = llama(6, 3)
    whole.requires_grad_(True)
    models = {flag: parallelize(copy.deepcopy(whole), None, sequence_parallel=flag) for flag in (False, True)}
    for length in (1, 5, 12):
        whole.zero_grad()
        expected = loss_of(whole, ids(length=max(2, length)))
        expected.backward()
        for flag, split in models.items():
            split.zero_grad()
            loss = loss_of(split, ids(length=max(2, length)))
            loss.backward()
            what = f"sequence_parallel={flag}, {length} tokens"
            assert_near(what, loss.detach(), expected.detach())
            assert_parameters_near(what, split, whole, rank, grads=True)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sequence_parallel_on_or_off_is_the_same_model(world_size: int) -> None:
    """2, 5 and 12 tokens: shards of unequal and of no length; norms have whole gradients right after backward."""
    run_distributed(world_size, _sequence)


def _frozen(rank: int, world_size: int, sequence_parallel: bool) -> dict[str, list[str]]:
    whole = llama(4, 1)
    split = parallelize(copy.deepcopy(whole), None, sequence_parallel=sequence_parallel)
    found = {}
    for frozen in ("", "layers.0", "proj", "norm"):
        for model in (whole, split):
            model.requires_grad_(True).zero_grad()
            for name, param in model.named_parameters():
                param.requires_grad_(not frozen or frozen not in name)
        loss_of(whole, ids()).backward()
        loss = loss_of(split, ids())
        with counted() as seen:
            loss.backward()
        assert_parameters_near(f"frozen {frozen!r}", split, whole, rank, grads=True)
        found[frozen] = seen
    with torch.no_grad():
        assert not loss_of(split, ids()).requires_grad
    with torch.inference_mode():
        assert_near("inference", loss_of(split, ids()), loss_of(whole, ids()).detach())
    assert_near("after inference", loss_of(split, ids()).detach(), loss_of(whole, ids()).detach())
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_frozen_weights_cost_no_products_and_keep_every_sum_of_dx(sequence_parallel: bool) -> None:
    """A rank that skips a collective because its weight is frozen leaves its peers waiting in it."""
    results = run_distributed(3, _frozen, sequence_parallel)
    sums = ("sum_gemm_all_reduce", "gemm_all_reduce", "sum_gemm_reduce_scatter", "gemm_reduce_scatter")
    for found in results:
        assert [op for op in found["proj"] if op in sums] == [op for op in found[""] if op in sums]
        assert (
            found["proj"].count("mm") <= found[""].count("mm") - 14
        )  # no dW of the seven linears of two layers
        assert [[op for op in seen if op not in ("mm", "addmm", "bmm")] for seen in found.values()] == [
            [op for op in seen if op not in ("mm", "addmm", "bmm")] for seen in results[0].values()
        ]


def _again(rank: int, world_size: int) -> None:
    whole = llama(4, 1)
    split = parallelize(copy.deepcopy(whole), None)
    for model in (whole, split):  # a graph that is kept, run twice; then micro batches on top
        loss = loss_of(model, ids())
        loss.backward(retain_graph=True)
        loss.backward()
        for micro in range(2):
            loss_of(model, ids(micro + 1)).backward()
    assert_parameters_near("accumulated", split, whole, rank, grads=True)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    whole.half().to(torch.bfloat16).double()
    split.half().to(torch.bfloat16).double()
    split.train()
    assert all(module.training for module in split.modules())
    split.eval()
    assert not any(module.training for module in split.modules())
    assert_parameters_near("cast", split, whole, rank, grads=False)
    assert_near("cast", loss_of(split, ids()).detach(), loss_of(whole, ids()).detach())


def test_graphs_are_run_again_gradients_accumulate_and_models_are_cast() -> None:
    """Saved tensors that a backward changed, products kept from another dtype, or a norm left in train mode."""
    run_distributed(2, _again)


def _make_block(name: str, group: object, sequence_parallel: bool) -> nn.Module:
    torch.manual_seed(2)
    options = {"group": group, "dtype": F64, "sequence_parallel": sequence_parallel}
    if name == "mlp":
        return ParallelMLP(6, 10, gated=True, activation="tanh", **options)
    return ParallelAttention(6, 2, 1, head_dim=4, bias=True, qk_norm_eps=1e-6, **options)


def _seconds(model: nn.Module, x: Tensor, bias: str) -> dict[str, Tensor | None]:
    """Gradients of a penalty on the gradients of x and, if named, of a replicated bias."""
    x = x.detach().clone().requires_grad_()
    named = {"x": x, **dict(model.named_parameters())}
    firsts = torch.autograd.grad(model(x).pow(3).sum(), [*named.values()], create_graph=True)
    grads = dict(zip(named, firsts, strict=True))
    penalty = grads["x"].pow(3).sum()
    if bias:
        penalty = penalty + grads[bias].pow(2).sum()
    found = torch.autograd.grad(penalty, [*named.values()], allow_unused=True)
    return dict(zip(named, found, strict=True))


@torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)  # the others have no second derivative
def _second_order(rank: int, world_size: int) -> None:
    alone = [torch.distributed.new_group([r]) for r in range(world_size)][rank]
    for name, last in (("mlp", "down_proj.bias"), ("attention", "o_proj.bias")):
        for sequence_parallel in (False, True):
            whole, split = _make_block(name, alone, False), _make_block(name, None, sequence_parallel)
            x, layouts = _draw(2, 2 * world_size, 6), layouts_of(split)
            own = x.chunk(world_size, 1)[rank] if sequence_parallel else x
            # with sequence_parallel the loss is the sum over the ranks, in which a penalty on b would count for each
            bias = "" if sequence_parallel else last
            expected, found = _seconds(whole, x, bias), _seconds(split, own, bias)
            for what, want in expected.items():
                if want is None or found[what] is None:
                    assert found[what] is None or not found[what].any(), what
                    continue
                want = layouts[what].take(want, rank) if what in layouts else want
                want = want.chunk(world_size, 1)[rank] if what == "x" and sequence_parallel else want
                assert_near(f"{name}, sequence_parallel={sequence_parallel}: {what}", found[what], want)


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_of_gradients_are_right(world_size: int) -> None:
    """A sum whose own backward sums again makes penalties world_size times too large, without any error."""
    run_distributed(world_size, _second_order)


class Reused(nn.Module):
    """Tied embedding, one block in two places, one weight in two linears, hooks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed = nn.Embedding(9, 6)
        block = nn.ModuleDict({"up": nn.Linear(6, 7), "down": nn.Linear(7, 6)})
        other = nn.ModuleDict({"up": nn.Linear(6, 7), "down": nn.Linear(7, 6)})
        other["up"].weight = block["up"].weight
        self.layers = nn.ModuleList([block, other, block])
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer["down"](torch.tanh(layer["up"](x)))
        return self.head(x)


def _reused(rank: int, world_size: int) -> None:
    whole = Reused()
    seen: list[str] = []
    for plan in (
        {"layers.*.up": "column", "layers.*.down": "row"},
        {"layers.*.up": "column", "layers.*.down": "row", "embed": "vocab_embedding", "head": "vocab_head"},
    ):
        split = parallelize(copy.deepcopy(whole), None, plan)
        assert split.head.weight is split.embed.weight and split.layers[0] is split.layers[2]
        assert split.layers[1]["up"].weight is split.layers[0]["up"].weight
        seen.clear()
        split.layers[0]["up"].register_full_backward_hook(lambda *_: seen.append("backward"))
        split.layers[0]["down"].register_forward_hook(lambda *_: seen.append("forward"))
        for model in (whole, split):
            model.zero_grad()
            model(torch.tensor([[1, 2, 8], [4, 5, 0]])).square().sum().backward()
        assert sorted(seen) == ["backward"] * 2 + ["forward"] * 2
        assert_parameters_near(str(plan), split, whole, rank, grads=True)


@pytest.mark.parametrize("world_size", [2, 3])
def test_shared_and_tied_parameters_have_the_sum_of_their_gradients(world_size: int) -> None:
    """Untied by a split, each copy would be trained on a part; hooks fire once per use."""
    run_distributed(world_size, _reused)


def _strides(rank: int, world_size: int) -> None:
    torch.manual_seed(3)
    column, row = nn.Linear(6, 7, dtype=F64), nn.Linear(7, 6, dtype=F64)
    ours = ColumnParallelLinear.from_linear(column), RowParallelLinear.from_linear(row)
    x = _draw(3, 4, 6)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "transposed": lambda t: t.transpose(0, 1),
        "every second": lambda t: t[::2],
        "expanded": lambda t: t[:1].expand(5, 4, 6),
        "a column of a wider one": lambda t: torch.cat([t, t], -1)[..., 3:9],
    }
    for way, view in ways.items():
        results = []
        for first, second in ((column, row), ours):
            value = x.clone().requires_grad_()
            for module in (first, second):
                module.zero_grad()
            out = second(torch.tanh(first(view(value))))
            out.sum().backward()  # dY has strides of 0
            hidden = first(value).add_(1)  # changed in place
            second(hidden).transpose(0, 1).square().sum().backward()
            results.append([value.grad, *(p.grad for m in (first, second) for p in m.parameters())])
        layouts = {**_prefixed("0", ours[0]), **_prefixed("1", ours[1])}
        names = ["x", *(f"{i}.{n}" for i, m in enumerate(ours) for n, _ in m.named_parameters())]
        for name, expected, found in zip(names, *results, strict=True):
            want = layouts[name].take(expected, rank) if name in layouts else expected
            assert_near(f"{way}: {name}", found, want)


def _prefixed(prefix: str, module: nn.Module) -> dict[str, object]:
    return {f"{prefix}.{name}": layout for name, layout in layouts_of(module).items()}


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_gradients_of_views_in_place_changes_and_biases_of_three_dims(world_size: int) -> None:
    """A copy that is summed and thrown away, a gradient summed in place, db with a dim too many."""
    run_distributed(world_size, _strides)


def _without_engine(rank: int, world_size: int) -> None:
    """The private question to the engine fails: needs_input_grad answers, and gradients are the same."""
    original = torch._C._will_engine_execute_node
    results = []
    for broken in (False, True):
        if broken:
            torch._C._will_engine_execute_node = _raise
        try:
            torch.manual_seed(0)
            mlp = ParallelMLP(6, 10, gated=True, activation="silu", dtype=F64)
            mlp.down_proj.weight.requires_grad_(False)
            x = _draw(4, 6).requires_grad_()
            mlp(x).sum().backward()
            assert mlp.down_proj.weight.grad is None
            results.append([x.grad, *(p.grad for p in mlp.parameters() if p.grad is not None)])
        finally:
            torch._C._will_engine_execute_node = original
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def _raise(node: object) -> bool:
    raise RuntimeError("not inside the engine")


def test_gradients_do_not_depend_on_the_private_question_to_the_engine() -> None:
    """Another torch may not have it; then work is done that might be skipped, and nothing else changes."""
    run_distributed(2, _without_engine)


def _cast(rank: int, world_size: int) -> None:
    whole = llama(4, 1).float()
    for flag in (False, True):
        split = parallelize(copy.deepcopy(whole), None, sequence_parallel=flag)
        grads = []
        for model in (whole, split):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(input_ids=ids()).logits
            assert logits.dtype == torch.bfloat16
            logits.float().square().mean().backward()
            grads.append({name: param.grad for name, param in model.named_parameters()})
        exact = copy.deepcopy(whole).double()
        exact.zero_grad()
        exact(input_ids=ids()).logits.square().mean().backward()
        layouts, ours, theirs = layouts_of(split), 0.0, 0.0
        for name, param in exact.named_parameters():
            assert grads[1][name].dtype == torch.float32, name
            true, rounded = param.grad, grads[0][name].double()
            if name in layouts:
                true, rounded = (layouts[name].take(t, rank) for t in (true, rounded))
            ours += (grads[1][name].double() - true).square().sum().item()
            theirs += (rounded - true).square().sum().item()
        assert 0 < ours <= 1.5**2 * theirs, f"sequence_parallel={flag}: {ours}, of the unsplit model {theirs}"


def test_autocast_rounds_no_more_than_on_the_unsplit_model() -> None:
    """fp32 weights, bf16 products, fp32 gradients, with and without shards of the sequence."""
    run_distributed(2, _cast)


def _norms(rank: int, world_size: int) -> None:
    split = parallelize(llama(4, 1), None, sequence_parallel=True)
    summed = [name for name, module in split.named_modules() if isinstance(module, SummedGradients)]
    assert len(summed) == 4 and train(split, steps=1)
    rows = {row.name: row for row in interlace.report(split).rows}
    assert all(rows[name].op == "all_reduce (backward)" for name in summed)


def test_norms_of_shards_are_in_the_report() -> None:
    run_distributed(2, _norms)
