"""`interlace.parallelize` and `interlace.report` as a door: what they say of a model, and of every mistake."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import interlace
import interlace.functional as il
from interlace.modules import ColumnParallelLinear, RowParallelLinear
from tests import oracle
from tests.distributed import run_distributed
from tests.interop.models import llama


def _table(rank: int, world_size: int) -> str:
    split = interlace.parallelize(llama(4, 1).float(), None)
    found = interlace.report(split)
    assert not found.unfused and len({row.name for row in found.rows}) == len(found.rows)
    by_name = {row.name: row for row in found.rows}
    query = by_name["model.layers.1.self_attn.q_proj"]
    assert query.style == "column" and query.shape == (32, 32) and query.op == "gemm_all_reduce (backward)"
    assert query.local_shape == (32 // world_size, 32) and query.path
    down = by_name["model.layers.0.mlp.down_proj"]
    assert down.style == "row" and down.shape == (32, 54) and down.op == "gemm_all_reduce"
    assert {row.source for row in found.rows} <= {"base_model_tp_plan", "structure"}
    given = interlace.parallelize(llama(4, 1), None, {"model.layers.*.mlp.up_proj": "column_gather_output"})
    rows = interlace.report(given).rows
    assert {row.source for row in rows} == {"given plan"}
    assert all(not row.fused and "fp64" in row.path for row in rows)
    made = nn.Sequential(ColumnParallelLinear(4, 4), RowParallelLinear(4, 4))
    assert {row.source for row in interlace.report(made).rows} == {""}
    return str(found)


def test_the_report_is_a_table_with_a_reason_in_every_row() -> None:
    table = run_distributed(2, _table)[0]
    lines = table.splitlines()
    columns = ["module", "style", "weight", "on this rank", "op", "fused", "path", "plan"]
    assert all(column in lines[0] for column in columns)
    starts = [lines[0].index(column) for column in columns[:-1]]
    assert all(line[start - 2 : start].isspace() for line in lines for start in starts[1:]), "not aligned"
    assert any(line.startswith("model.layers.*.mlp.up_proj (2)") for line in lines)


class Odd(nn.Module):
    """A stack in which this and that cannot be split."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 6)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "up": nn.Linear(6, 8),
                    "down": nn.Linear(8, 6),
                    "norm": nn.LayerNorm(6),
                    "conv": nn.Conv1d(6, 6, 1),
                }
            )
            for _ in range(2)
        )
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.embed.weight


def _refused(
    model: nn.Module, error: type[Exception], text: str, mesh: object = None, **options: object
) -> None:
    """Raises on this rank (all ranks call this), and leaves every module, attribute and value as they were."""
    before = {name: (id(module), set(vars(module))) for name, module in model.named_modules()}
    values = {name: param.detach().clone() for name, param in model.named_parameters()}
    with pytest.raises(error, match=text):
        interlace.parallelize(model, mesh, **options)
    assert before == {name: (id(module), set(vars(module))) for name, module in model.named_modules()}, text
    assert all(torch.equal(param, values[name]) for name, param in model.named_parameters()), text


def _mistakes(rank: int, world_size: int) -> None:
    column = {"layers.*.up": "column"}
    _refused(Odd(), ValueError, r"pattern 'layers.\*.uup' matches no module; the modules are layers.0.up",
             plan={"layers.*.uup": "column"})  # fmt: skip
    _refused(
        Odd(), ValueError, "pattern 'model.layers.0.up' matches no module", plan={"model.layers.0.up": "row"}
    )
    _refused(
        Odd(), TypeError, "layers.0.norm: expected an nn.Linear, got LayerNorm", plan={"layers.*.norm": "row"}
    )
    _refused(
        Odd(), TypeError, "layers.0.conv: expected an nn.Linear, got Conv1d", plan={"layers.*.conv": "column"}
    )
    _refused(Odd(), ValueError, "tied parameter .*embed.weight.*head.weight", plan={"head": "row"})
    _refused(Odd(), ValueError, "tied parameter .*embed.weight.*head.weight", plan={"head": "column"})
    mesh = DeviceMesh("cpu", torch.arange(world_size).view(1, -1), mesh_dim_names=("data", "model"))
    _refused(
        Odd(), ValueError, r'axes .*data.*model.*; pick one, for example mesh\["model"\]', mesh, plan=column
    )
    nameless = DeviceMesh("cpu", torch.arange(world_size).view(1, -1))
    _refused(
        Odd(), ValueError, "mesh of one axis, got 2 axes without names; name them", nameless, plan=column
    )
    with pytest.raises(KeyError, match="tp"):
        mesh["tp"]  # torch's own error: the axis does not exist
    mixed = llama(4, 1).float()
    mixed.model.layers[1].self_attn.k_proj.to(torch.bfloat16)
    _refused(
        mixed,
        TypeError,
        r"differ in dtype: model.layers.1.self_attn.q_proj is torch.float32, .*k_proj is torch.bf",
    )
    _refused(Odd().double(), ValueError, "strict=True, but gemm_all_reduce of layers.0.up is not fused: .*fp64",
             plan=column, strict=True)  # fmt: skip
    split = interlace.parallelize(Odd(), None, column)
    _refused(
        split,
        ValueError,
        "layers.0.up is a ColumnParallelLinear already; parallelize a model once",
        plan=column,
    )
    only_one = column if rank == 0 else {"layers.*.down": "row"}
    _refused(Odd(), ValueError, "ranks 0 and 1 have different plans", plan=only_one)
    late = Odd() if rank == 0 else "no model"
    with pytest.raises(ValueError if rank == 0 else TypeError, match="got str"):
        interlace.parallelize(late, None, column)


def test_mistakes_name_the_module_on_every_rank_and_change_nothing() -> None:
    """Half a swap, an error on one rank only, or a warning nobody reads: each ends in wrong numbers or in a hang."""
    run_distributed(2, _mistakes)


def _opt(rank: int, world_size: int) -> None:
    import transformers

    config = transformers.OPTConfig(
        vocab_size=61, hidden_size=32, ffn_dim=48, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=32, word_embed_proj_dim=32,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.OPTForCausalLM(config)
    _refused(
        model,
        ValueError,
        "with sequence_parallel model.decoder.layers.0 may not reshape",
        sequence_parallel=True,
    )
    interlace.parallelize(model, None)


def test_a_layer_that_reshapes_its_input_is_refused_under_sequence_parallel() -> None:
    """OPT flattens the sequence into rows: cut there, rows of one rank would be taken for those of another."""
    pytest.importorskip("transformers")
    run_distributed(2, _opt)


def _gathered(rank: int, world_size: int) -> None:
    """One gather that also gives x: gradients of both uses, against one process."""
    generator = torch.Generator().manual_seed(3)
    for length in (2 * world_size, 2 * world_size + 1):
        whole = oracle.integers((2, length, 4), torch.float64, generator).requires_grad_()
        weights = [oracle.integers((3, 4), torch.float64, generator) for _ in range(world_size)]
        others = [oracle.integers((2, length, 4), torch.float64, generator) for _ in range(world_size)]
        part = whole.detach().chunk(world_size, 1)[rank].clone().requires_grad_()
        weight = weights[rank].clone().requires_grad_()
        out, x = il.all_gather_linear(
            part, weight, group=None, gather_dim=1, gather_size=length, return_gathered=True
        )
        assert torch.equal(x, whole) and torch.equal(out, whole @ weight.t())
        (out.sum() + (x * others[rank]).sum()).backward()
        total = sum((whole @ w.t()).sum() + (whole * o).sum() for w, o in zip(weights, others, strict=True))
        expected: Tensor = torch.autograd.grad(total, whole)[0]
        oracle.check_equal("grad_x", part.grad, expected.chunk(world_size, 1)[rank])
        oracle.check_equal("grad_weight", weight.grad, whole.detach().sum((0, 1)).expand(3, 4))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_gather_hands_out_the_gathered_input_with_its_gradient(world_size: int) -> None:
    run_distributed(world_size, _gathered)
