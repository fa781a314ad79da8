"""`parallelize` itself: plans, mistakes, what stays of a model, counts of collectives, the report."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import interlace
from interlace.modules import ColumnParallelLinear, RowParallelLinear
from interlace.parallelize.api import parallelize
from interlace.parallelize.report import report
from tests.distributed import run_distributed
from tests.parallelize.models import assert_near, own_part

MLP_PLAN = {"layers.*.up": "column", "layers.*.down": "row"}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 11)
        self.down = nn.Linear(11, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Head(nn.Module):
    """Attention written as people write it: heads counted in an attribute, views with that number."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.n_rep = heads, kv_heads, heads // kv_heads
        self.wq, self.wk, self.wv = (nn.Linear(6, n * 4) for n in (heads, kv_heads, kv_heads))
        self.wo = nn.Linear(heads * 4, 6)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q = self.wq(x).view(batch, tokens, self.n_heads, 4).transpose(1, 2)
        k = self.wk(x).view(batch, tokens, self.n_kv_heads, 4).transpose(1, 2)
        v = self.wv(x).view(batch, tokens, self.n_kv_heads, 4).transpose(1, 2)
        k, v = (t.repeat_interleave(self.n_rep, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(batch, tokens, -1))


class Net(nn.Module):
    """Embedding, layers, and an output head tied to the embedding."""

    def __init__(self, layers: int = 2, heads: tuple[int, int] | None = None) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(9, 6)
        blocks = [Layer() for _ in range(layers)]
        self.layers = nn.ModuleList([m for b in blocks for m in ([Head(*heads)] if heads else []) + [b]])
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


IDS = torch.tensor([[1, 2, 3, 4, 5], [8, 7, 6, 5, 4]])


def _compare(split: nn.Module, whole: nn.Module, ids: Tensor = IDS) -> None:
    for model in (split, whole):
        model.zero_grad()
        model(ids).square().sum().backward()
    assert_near("output", split(ids), whole(ids))
    named, modules = dict(split.named_parameters()), dict(split.named_modules())
    assert set(named) == set(dict(whole.named_parameters()))
    for name, param in whole.named_parameters():
        want = own_part(param.grad, modules[name.rpartition(".")[0]], name)
        assert_near(f"gradient of {name}", named[name].grad, want)


def _plans(rank: int, world_size: int) -> None:
    whole = Net()
    mesh = DeviceMesh("cpu", list(range(world_size)))
    for group in (mesh, dist.group.WORLD, None, dist.group.WORLD.group_name):
        split = parallelize(copy.deepcopy(whole), group, MLP_PLAN)
        assert isinstance(split.layers[0].up, ColumnParallelLinear)
        assert isinstance(split.layers[1].down, RowParallelLinear)
        assert split.head.weight is split.embed.weight, "untied"
        _compare(split, whole)
    aliases = {"layers.?.up": "colwise", "layers.[01].down": "rowwise"}
    _compare(parallelize(copy.deepcopy(whole), None, aliases), whole)
    lonely = {"layers.0.up": "column_gather_output", "layers.1.down": "row_split_input"}
    _compare(parallelize(copy.deepcopy(whole), None, lonely), whole)
    sequence = MLP_PLAN | {
        "layers.*.norm": "summed",
        "layers.0": "scatter_sequence",
        "layers.1": "gather_sequence",
    }
    _compare(parallelize(copy.deepcopy(whole), None, sequence, sequence_parallel=True), whole)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_plan_of_patterns_splits_any_module(world_size: int) -> None:
    """Every kind of group; names, ties and gradients stay; 11 features and 5 tokens do not divide."""
    run_distributed(world_size, _plans)


def _own_attention(rank: int, world_size: int) -> None:
    for heads in ((6, 2), (4, 4), (3, 1), (2, 1)):
        whole = Net(heads=heads)
        plan = {"layers.*.w[qkv]": "column", "layers.*.wo": "row"} | MLP_PLAN
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            split = parallelize(copy.deepcopy(whole), None, plan)
        _compare(split, whole)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_attention_named_in_a_plan_is_cut_by_heads(world_size: int) -> None:
    """Cut by rows instead, heads would be torn apart, and an attribute that counts all heads mixes tokens."""
    run_distributed(world_size, _own_attention)


def _refused(model: nn.Module, error: type[Exception], text: str, **options: object) -> None:
    before = {name: id(module) for name, module in model.named_modules(remove_duplicate=False)}
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(error, match=text):
        parallelize(model, None, **options)
    assert before == {name: id(module) for name, module in model.named_modules(remove_duplicate=False)}, text
    for name, module in model.named_modules():
        assert set(vars(module)) == set(attributes[name]), text


class Unknown(nn.Module):
    """A stack of layers with a matrix that no recipe covers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Head(2, 2)])
        self.layers[0].extra = nn.Linear(6, 6)


def _mistakes(rank: int, world_size: int) -> None:
    _refused(
        Net(),
        ValueError,
        r"'layers.\*.upp' matches no module; the modules are layers.0.up",
        plan={"layers.*.upp": "row"},
    )
    _refused(
        Net(), ValueError, "'colum' is no style; expected one of column, row", plan={"layers.*.up": "colum"}
    )
    _refused(
        Net(),
        TypeError,
        "layers.0.norm: expected an nn.Linear, got LayerNorm",
        plan={"layers.*.norm": "column"},
    )
    both = {"layers.*.up": "column", "layers.0.up": "row"}
    _refused(Net(), ValueError, "layers.0.up would be both column and row", plan=both)
    _refused(Net(), ValueError, "no stack of layers.*Pass plan=", plan="auto")
    _refused(Net(), ValueError, "plan='tp'", plan="tp")
    _refused(
        Net(),
        ValueError,
        r"tied parameter .* embed.weight \(replicated\), head.weight",
        plan={"head": "column"},
    )
    _refused(
        Net(), ValueError, "need sequence_parallel=True", plan=MLP_PLAN | {"layers.0": "scatter_sequence"}
    )
    _refused(Net(), ValueError, "layers.0 has children with parameters", plan={"layers.0": "summed"})
    _refused(Unknown(), ValueError, "Unknown is not an architecture", plan="auto")
    _refused(
        nn.Sequential(nn.MultiheadAttention(4, 2)),
        TypeError,
        "reads its weight without",
        plan={"0.out_proj": "row"},
    )
    _refused(Net(), ValueError, "strict=True, but gemm_all_reduce of layers.0.up", plan=MLP_PLAN, strict=True)
    _refused(
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), TypeError, "of its own", plan={"": "column"}
    )
    parallelize(Net().float(), None, MLP_PLAN, strict=True)
    split = parallelize(Net(), None, MLP_PLAN)
    _refused(split, ValueError, "layers.0.up is a ColumnParallelLinear already", plan=MLP_PLAN)
    with pytest.raises(TypeError, match=r"expected an nn\.Module, got dict"):
        parallelize({}, None)
    with pytest.raises(ValueError, match="expected a mesh of one axis"):
        parallelize(Net(), DeviceMesh("cpu", torch.arange(world_size).view(1, -1)))


def test_mistakes_are_named_and_leave_the_model_as_it_was() -> None:
    """Half a swap would leave a model that is neither: everything is checked before the first swap."""
    run_distributed(2, _mistakes)


def _disagreement(rank: int, world_size: int) -> None:
    model = Net()
    if rank == 1:
        model.layers[1].up.bias.data[3] += 1
    _refused(
        model, ValueError, "ranks 0 and 1 hold different models, first at layers.1.up.bias", plan=MLP_PLAN
    )
    plan = MLP_PLAN if rank else {"layers.*.up": "column_gather_output"}
    _refused(Net(), ValueError, "ranks 0 and 1 have different plans", plan=plan)
    expected = ("rank 1 cannot: .*matches no module", "matches no module")[rank]
    _refused(Net(), ValueError, expected, plan={"nothing": "row"} if rank else MLP_PLAN)
    if rank == 1:
        model = "not a module"
        with pytest.raises(TypeError, match="got str"):
            parallelize(model, None, MLP_PLAN)
    else:
        _refused(Net(), ValueError, "rank 1 cannot: .*got str", plan=MLP_PLAN)
    _compare(parallelize(Net(), None, MLP_PLAN), Net())


def test_ranks_that_disagree_all_raise() -> None:
    """A rank that fails alone would leave its peers waiting; models seeded differently give silent nonsense."""
    run_distributed(2, _disagreement)


def _kept(rank: int, world_size: int) -> None:
    whole = Net()
    calls: list[str] = []
    whole.layers[0].up.register_forward_hook(_Note(calls))
    whole.layers[0].down.requires_grad_(False)
    whole.layers.append(whole.layers[0])  # one layer used twice
    whole.layers[1].up.weight = whole.layers[0].up.weight  # and one weight in two linears
    split = parallelize(copy.deepcopy(whole), None, MLP_PLAN | {"layers.2.*p": "column"})
    assert split.layers[2] is split.layers[0]
    assert split.layers[1].up.weight is split.layers[0].up.weight
    assert not split.layers[0].down.weight.requires_grad and split.layers[1].down.weight.requires_grad
    whole.layers[0].down.requires_grad_(True)
    split.layers[0].down.requires_grad_(True)
    _compare(split, whole)
    assert split.layers[0].up._forward_hooks, "hooks are lost"
    buffer = io.BytesIO()
    torch.save(split, buffer)
    buffer.seek(0)
    for other in (
        copy.deepcopy(split),
        pickle.loads(pickle.dumps(split)),
        torch.load(buffer, weights_only=False),
    ):
        assert other.layers[1].up.weight is other.layers[0].up.weight
        _compare(other, whole)
        other.load_state_dict(split.state_dict())


class _Note:
    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def __call__(self, module: nn.Module, args: object, out: Tensor) -> None:
        self.calls.append(type(module).__name__)


def test_ties_hooks_flags_and_copies_survive() -> None:
    """A tied or shared weight must stay one; a copy of a split model must work without the original."""
    run_distributed(2, _kept)


def _counts(rank: int, world_size: int) -> None:
    from tests.parallelize import models

    ids = torch.randint(1, 61, (2, 6), generator=torch.Generator().manual_seed(1))
    for family in ("llama", "bert"):
        per_model = []
        for layers in (1, 2):
            model = parallelize(models.make(family, 4, 4, num_hidden_layers=layers).float(), None)
            with interlace.count_ops() as counts:
                model(input_ids=ids).logits.sum().backward()
            per_model.append((counts.forward.total(), counts.backward.total()))
        # the sum of the embedding, the gather of the logits, and the sum of what the head sends back
        assert per_model == [(2 + 2, 1 + 2), (2 + 4, 1 + 4)], f"{family}: {per_model}"
        sequence = parallelize(models.make(family, 4, 4).float(), None, sequence_parallel=True)
        with interlace.count_ops() as counts:
            sequence(input_ids=ids)
        found = counts.forward
        assert found.pop("all_reduce") == 1, found  # of the embedding
        assert found.pop("all_gather") == 2, found  # behind the last layer, and of the logits
        assert found == {"all_gather_gemm": 4, "gemm_reduce_scatter": 4}, f"{family}: {found}"


def test_a_layer_has_two_collectives_forward_and_two_backward() -> None:
    """q, k, v and gate, up separately would sum dX three times and twice; gathers likewise."""
    pytest.importorskip("transformers")
    run_distributed(2, _counts, timeout=120.0)


def _reports(rank: int, world_size: int) -> list[str]:
    tables = []
    for dtype in (torch.float32, torch.float64):
        split = parallelize(Net().to(dtype), None, MLP_PLAN)
        found = report(split)
        assert [row.fused for row in found.rows] == [dtype == torch.float32 or world_size == 1] * 4
        tables.append(str(found))
    with pytest.raises(ValueError, match=r"call interlace\.parallelize first"):
        report(Net())
    return tables


def test_the_report_says_for_every_module_whether_it_is_fused_and_why() -> None:
    """A silent fallback is the commonest complaint about such layers."""
    fused, library = run_distributed(2, _reports)[0]
    assert "layers.*.up (2)" in fused and "11 x 6" in fused and "6 x 6" in fused and "one_shot" in fused
    assert "no" in library and "fp64 has no tile kernel" in library
    assert "one rank" in run_distributed(1, _reports)[0][0]


def _axis(rank: int, world_size: int) -> None:
    mesh = DeviceMesh("cpu", torch.arange(world_size).view(2, 2), mesh_dim_names=("dp", "tp"))
    whole = Net(heads=(3, 1))
    plan = {"layers.*.w[qkv]": "column", "layers.*.wo": "row"} | MLP_PLAN
    with pytest.raises(ValueError, match="expected a mesh of one axis, got axes"):
        parallelize(copy.deepcopy(whole), mesh, plan)
    split = parallelize(copy.deepcopy(whole), mesh["tp"], plan)
    ids = IDS + rank // 2  # each pair of the data-parallel axis has data of its own
    _compare(split, whole, ids.clamp(max=8))


def test_one_axis_of_a_mesh_is_a_group_of_its_own() -> None:
    """Two tensor-parallel pairs at once: names, workspaces and gradients of one must not meet the other's."""
    run_distributed(4, _axis)


def _packed(rank: int, world_size: int) -> None:
    whole = Net().float().requires_grad_(False)
    split = interlace.pack_weights(interlace.parallelize(copy.deepcopy(whole), None, MLP_PLAN))
    for other in (split, copy.deepcopy(split)):
        torch.testing.assert_close(other(IDS), whole(IDS), rtol=1e-5, atol=1e-5)
    assert all(type(value) is Tensor for value in split.state_dict().values())
    assert interlace.report(split).rows[0].local_shape == (-(-11 // world_size) if rank == 0 else 5, 6)


def test_a_split_model_takes_packed_weights() -> None:
    """Inference keeps one copy of each weight, in the layout of the tile engine; names and plain state dict stay."""
    run_distributed(2, _packed)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = Head(3, 1), Layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x + self.attn(x))


def _own_model(rank: int, world_size: int) -> None:
    whole = Net(layers=0)
    whole.layers = nn.ModuleList([Block() for _ in range(2)]).double()
    for sequence_parallel in (False, True):
        split = parallelize(copy.deepcopy(whole), None, sequence_parallel=sequence_parallel)
        assert isinstance(split.layers[1].attn.wo, RowParallelLinear)
        _compare(split, whole)


@pytest.mark.parametrize("world_size", [2, 4])
def test_auto_recognises_a_decoder_of_ones_own(world_size: int) -> None:
    """By names, shapes and source, without a config: heads counted in attributes, 3 of them on 2 and 4 ranks."""
    run_distributed(world_size, _own_model)
