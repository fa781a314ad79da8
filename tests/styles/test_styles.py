"""Styles for torch's parallelize_module: values, gradients, ties, copies, and what they refuse."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from interlace import styles
from interlace.counting import count_ops
from interlace.parallelize.report import report
from interlace.paths import last_path
from tests.distributed import run_distributed, subgroup
from tests.styles import model as tiny


def _whole_model(rank: int, world_size: int) -> None:
    mesh = tiny.tp_mesh()
    for sequence_parallel in (False, True):
        model = tiny.check_model(tiny.make(), mesh, tiny.ids_of(length=7), sequence_parallel)
        assert model.head.weight is model.embed.weight, "the tie is gone"
        assert model.layers[0].attn.num_heads == tiny.HEADS // world_size
        assert world_size == 1 or last_path().fused, last_path()
        rows = {row.name: row for row in report(model).rows}
        assert rows["layers.0.mlp.down_proj"].style == "row" and rows["embed"].style == "vocab_embedding"
        head = rows["head"]
        assert (head.shape, head.local_shape) == ((23, 24), tuple(model.head.weight.to_local().shape))
        assert head.source == "styles" and head.op, str(head)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_model_split_by_styles_equals_the_unsplit_one(world_size: int) -> None:
    """Uneven vocabulary, hidden size and sequence, tied head, per-head norms, biases: all gradients, with and without
    sequence parallel."""
    run_distributed(world_size, _whole_model)


def _linear_cases(rank: int, world_size: int) -> None:
    mesh = tiny.tp_mesh()
    for features, other in ((5, 7), (2, 3), (12, 8)):  # uneven; fewer than ranks; even
        for bias in (True, False):
            torch.manual_seed(2)
            whole = nn.Linear(features, other, bias=bias).double()
            x = torch.randn(2, 3, features, dtype=torch.float64)
            for style in (styles.ColumnLinear(gather_output=True), styles.RowLinear(split_input=True)):
                linear = parallelize_module(copy.deepcopy(whole), mesh, style)
                ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
                out, expected = linear(ours), whole(theirs)
                tiny.assert_near("out", out, expected)
                whole.zero_grad()
                tiny.loss_of(out).backward()
                tiny.loss_of(expected).backward()
                tiny.assert_near("grad_x", ours.grad, theirs.grad)
                tiny.check_grads(whole, linear)
                row = isinstance(style, styles.RowLinear)
                assert linear.weight.placements == (Shard(1) if row else Shard(0),)
                if bias:
                    assert linear.bias.placements == (Replicate() if row else Shard(0),)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_linears_of_any_size_gather_and_split(world_size: int) -> None:
    run_distributed(world_size, _linear_cases)


def _from_rank_zero(rank: int, world_size: int) -> None:
    torch.manual_seed(rank)
    linear = nn.Linear(4, 6)
    mine = linear.weight.detach().clone()
    own = copy.deepcopy(linear)
    mesh = tiny.tp_mesh()
    parallelize_module(linear, mesh, styles.ColumnLinear())
    torch.manual_seed(0)
    assert torch.equal(linear.weight.full_tensor(), nn.Linear(4, 6).weight), (
        "rank 0's weights, as torch's styles"
    )
    parallelize_module(own, mesh, styles.ColumnLinear(), src_data_rank=None)
    assert torch.equal(own.weight.to_local(), mine.chunk(world_size)[rank])
    assert torch.equal(copy.deepcopy(own).weight.to_local(), own.weight.to_local())
    assert own.weight.to_local().untyped_storage().nbytes() == 3 * 4 * 4, (
        "a view keeps the whole weight alive"
    )
    meta = nn.Linear(4, 6, device="meta")
    parallelize_module(meta, mesh, styles.RowLinear())
    assert meta.weight.is_meta and meta.weight.shape == (6, 4) and meta.weight.to_local().shape == (6, 2)


def test_weights_come_from_rank_zero_unless_told_otherwise() -> None:
    """torch's parallelize_module promises the values of src_data_rank; None means each rank's own."""
    run_distributed(2, _from_rank_zero)


def _copies(rank: int, world_size: int) -> None:
    model = tiny.split(tiny.make(), tiny.tp_mesh())
    ids = tiny.ids_of()
    expected = model(ids).detach()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    assert torch.equal(model(ids), expected)
    assert not other(ids).any(), "the copy calls the original's weights"
    assert other.head.weight is other.embed.weight
    tiny.loss_of(other(ids)).backward()
    assert all(param.grad is None for param in model.parameters())


def _pickled(rank: int, world_size: int) -> None:
    linear = parallelize_module(nn.Linear(4, 6), tiny.tp_mesh(), styles.ColumnLinear())
    buffer = io.BytesIO()
    torch.save(linear.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert torch.equal(loaded["weight"].to_local(), linear.weight.to_local())


def test_copies_are_independent_and_state_dicts_save() -> None:
    """A closure as forward would run the original's weights in every copy."""
    run_distributed(2, _copies)
    run_distributed(2, _pickled)


def _compiled(rank: int, world_size: int, sequence_parallel: bool) -> None:
    whole = tiny.make(layers=1)
    model = tiny.split(copy.deepcopy(whole), tiny.tp_mesh(), sequence_parallel)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    ids = tiny.ids_of(length=6)
    expected, logits = whole(ids), compiled(ids)
    tiny.assert_near("logits", logits, expected)
    tiny.loss_of(expected).backward()
    tiny.loss_of(logits).backward()
    tiny.check_grads(whole, model)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_model_with_styles_compiles_without_graph_breaks(sequence_parallel: bool) -> None:
    run_distributed(2, _compiled, sequence_parallel, timeout=180.0)


def _autocast_and_frozen(rank: int, world_size: int) -> None:
    whole = tiny.make(torch.float32)
    model = tiny.split(copy.deepcopy(whole), tiny.tp_mesh())
    ids = tiny.ids_of()
    with torch.autocast("cpu", torch.bfloat16):
        expected, logits = whole(ids), model(ids)
    assert logits.dtype == expected.dtype == torch.bfloat16
    tiny.assert_near(
        "logits", logits.float(), expected.float(), 0.03
    )  # bf16 rounds at 0.004, a dozen layers deep
    logits.float().sum().backward()
    assert all(param.grad.dtype == torch.float32 for param in model.parameters())
    whole = tiny.make()
    for name, param in whole.named_parameters():
        param.requires_grad_("norm" in name)
    model = tiny.check_model(whole, tiny.tp_mesh(), ids, sequence_parallel=True)
    assert model.layers[0].mlp.up_proj.weight.grad is None and model.norm.weight.grad is not None


def test_autocast_and_frozen_weights() -> None:
    """Frozen linears must pass dX on, and summed norms must not wait for gradients nobody computes."""
    run_distributed(2, _autocast_and_frozen)


def _counts(rank: int, world_size: int) -> None:
    mesh = tiny.tp_mesh()
    for sequence_parallel in (False, True):
        found = []
        for layers in (1, 2):
            model = tiny.split(tiny.make(layers=layers), mesh, sequence_parallel)
            with count_ops() as counts:
                tiny.loss_of(model(tiny.ids_of(length=8))).backward()
            found.append(counts)
        forward, backward = (found[1].forward - found[0].forward, found[1].backward - found[0].backward)
        norms = backward.pop(
            "all_reduce"
        )  # of q_norm and k_norm; of norm1 and norm2 with a shard of the sequence
        assert norms == (4 if sequence_parallel else 2)
        if not sequence_parallel:
            assert forward == {"gemm_all_reduce": 2}
            assert backward == {"sum_gemm_all_reduce": 2}
            continue
        assert forward == {"all_gather_gemm": 2, "gemm_reduce_scatter": 2}
        # as many pairs backward, and the two gathers for the weight gradients of what was not kept
        gathers = {"all_gather_gemm": 2, "all_gather": 2}
        assert backward == {**gathers, "sum_gemm_reduce_scatter": 2}


def test_a_layer_has_two_collectives_each_way() -> None:
    """q, k, v share one, gate and up share one; apart they would be five."""
    run_distributed(2, _counts)


def _ties(rank: int, world_size: int) -> None:
    mesh = tiny.tp_mesh()
    model = tiny.make()
    parallelize_module(model, mesh, {"embed": styles.VocabEmbedding()})
    with pytest.raises(
        ValueError, match=r"weight of Embedding.*tied to a parameter of a module that got no style"
    ):
        model(tiny.ids_of())
    model = tiny.make()
    parallelize_module(model, mesh, {"embed": styles.VocabEmbedding()})
    with pytest.raises(
        ValueError, match=r"RowLinear: weight \(23, 24\) is tied .*Shard.*dim=0.*Shard.*dim=1"
    ):
        parallelize_module(model, mesh, {"head": styles.RowLinear(split_input=True)})
    held = nn.Linear(4, 4)
    kept = held.weight  # a variable is no module
    parallelize_module(held, mesh, styles.ColumnLinear())
    held(torch.randn(1, 4))
    assert not isinstance(kept, DTensor)


def test_tied_parameters_stay_one_or_are_refused() -> None:
    """torch's own styles untie them silently, and both halves of the gradient are then wrong."""
    run_distributed(2, _ties)


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def _refusals(rank: int, world_size: int) -> None:
    mesh = tiny.tp_mesh()
    attention = tiny.make(heads=9, kv_heads=3).layers[0].attn
    for module, style, error, text in (
        (
            nn.Conv1d(2, 2, 1),
            styles.ColumnLinear(),
            TypeError,
            "ColumnLinear: expected an nn.Linear, got Conv1d",
        ),
        (Scaled(2, 2), styles.RowLinear(), TypeError, "RowLinear: Scaled has a forward"),
        (nn.Linear(2, 2), styles.VocabEmbedding(), TypeError, "VocabEmbedding: expected an nn.Embedding"),
        (nn.Embedding(4, 2, max_norm=1.0), styles.VocabEmbedding(), ValueError, "max_norm"),
        (nn.ReLU(), styles.SequenceNorm(), ValueError, "SequenceNorm: ReLU has no parameters of its own"),
        (
            attention,
            styles.Attention(),
            ValueError,
            "9 query and 3 key/value heads .*use interlace.parallelize",
        ),
        (attention, styles.Attention(o="out"), ValueError, "has no child 'out'; its children are: q_proj"),
        (attention, styles.Attention(head_dim=5), ValueError, "not heads of head_dim=5"),
        (attention, styles.GateUp(), ValueError, "GateUp: SelfAttention has no child 'gate_proj'"),
    ):
        with pytest.raises(error, match=text):
            parallelize_module(module, mesh, style)
        assert not any(isinstance(param, DTensor) for param in module.parameters()), (
            "changed before it was refused"
        )
    with pytest.raises(ValueError, match="has a style already"):
        parallelize_module(
            parallelize_module(nn.Linear(2, 2), mesh, styles.ColumnLinear()), mesh, styles.RowLinear()
        )
    with pytest.raises(ValueError, match=r"expected a mesh of one axis, got axes \('replica', 'tp'\)"):
        alone = [subgroup([one]) for one in range(2)][rank]
        groups = [alone, dist.group.WORLD]
        axes = DeviceMesh.from_group(groups, "cpu", [[0, 1]], mesh_dim_names=("replica", "tp"))
        parallelize_module(nn.Linear(2, 2), axes, styles.ColumnLinear())
    with pytest.raises(ValueError, match="name two or more children"):
        styles.SharedColumns("q")
    linear = parallelize_module(nn.Linear(6, 4), mesh, styles.RowLinear())
    with pytest.raises(ValueError, match=r"linear_all_reduce: x \[2, 6\] needs a weight"):
        linear(torch.randn(2, 6))


def test_what_cannot_be_split_is_refused_unchanged() -> None:
    run_distributed(2, _refusals)


def _norm_sums(rank: int, world_size: int) -> None:
    torch.manual_seed(4)
    whole = nn.LayerNorm(6).double()
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    norm = parallelize_module(copy.deepcopy(whole), tiny.tp_mesh(), styles.SequenceNorm())
    weights = torch.randn(2, 5, 6, dtype=torch.float64)
    (whole(x) * weights).sum().backward()
    part, own = x.chunk(world_size, 1), weights.chunk(world_size, 1)
    (norm(part[rank]) * own[rank]).sum().backward()
    assert not isinstance(norm.weight.grad.placements[0], Partial)
    tiny.assert_near("weight, right after backward", norm.weight.grad.to_local(), whole.weight.grad)
    tiny.assert_near("bias", norm.bias.grad.to_local(), whole.bias.grad)
    tiny.assert_near("out", norm(part[rank]), F.layer_norm(part[rank], (6,), whole.weight, whole.bias))


def test_norms_of_a_sequence_shard_have_summed_gradients_right_after_backward() -> None:
    run_distributed(3, _norm_sums)
