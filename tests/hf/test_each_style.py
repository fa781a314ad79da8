"""Each stock style name on a module of its own: ours against the unsplit module and against the stock style."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from interlace import hf
from interlace.styles.parameters import SplitForward
from tests.distributed import run_distributed

pytest.importorskip("transformers")

PLAN = {
    "embed": "embedding_colwise",
    "table": "embedding_rowwise",
    "fused": "packed_colwise",
    "down": "rowwise",
    "wide": "colwise_gather_output",
    "wide_rep": "colwise_rep",
    "narrow": "rowwise_split_input",
    "narrow_rep": "rowwise_rep",
}


class Everything(nn.Module):
    """Sizes that do not divide, and biases, wherever the stock style takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.table = nn.Embedding(9, 7, padding_idx=2), nn.Embedding(9, 7)
        self.fused, self.down = nn.Linear(7, 24), nn.Linear(12, 7)
        self.wide, self.wide_rep = nn.Linear(7, 11), nn.Linear(11, 5)
        self.narrow, self.narrow_rep = nn.Linear(5, 9, bias=False), nn.Linear(9, 7)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.table(ids)
        gate, up = self.fused(x).chunk(2, dim=-1)
        x = x + self.down(F.silu(gate) * up)
        return self.narrow_rep(self.narrow(self.wide_rep(self.wide(x))))


class Scaled(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 3


def _mesh() -> DeviceMesh:
    return DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh_dim_names=("tp",))


def _split(model: nn.Module, plan: dict[str, str]) -> nn.Module:
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    names: dict[str, str] = {}
    for name, style in plan.items():
        module = model.get_submodule(name)
        names |= {f"{name}.{param}": style for param, _ in module.named_parameters(recurse=False)}
        names[name] = style
    return apply_tensor_parallelism(model, _mesh(), names)


def _near(what: str, found: Tensor, expected: Tensor) -> None:
    found = found.full_tensor() if isinstance(found, DTensor) else found
    error = ((found - expected).norm() / expected.norm().clamp_min(1e-9)).item()
    assert error < 1e-12, f"{what}: relative error {error:.2e}"


def _all_styles(rank: int, world_size: int) -> None:
    torch.manual_seed(5)
    whole = Everything().double()
    ids = torch.randint(0, 9, (2, 6), generator=torch.Generator().manual_seed(1))
    with hf.enable():
        model = _split(copy.deepcopy(whole), PLAN)
    for name in PLAN:
        assert isinstance(vars(model.get_submodule(name))["forward"], SplitForward), name
    found, expected = model(ids), whole(ids)
    assert type(found) is Tensor
    _near("out", found, expected)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for out in (found, expected):
        (out * weights).sum().backward()
    for name, param in whole.named_parameters():
        _near(name, model.get_parameter(name).grad, param.grad)


@pytest.mark.parametrize("world_size", [2, 3])
def test_linears_and_embeddings_of_every_stock_style(world_size: int) -> None:
    """Packed rows with a bias, uneven rows and columns, both ways to cut a table: output and all gradients."""
    run_distributed(world_size, _all_styles)


def _stock_forwards(rank: int, world_size: int) -> None:
    torch.manual_seed(5)
    whole = nn.ModuleDict({"scaled": Scaled(8, 4), "linear": nn.Linear(4, 6)}).double()
    ids = torch.arange(8)
    with hf.enable(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = _split(
            copy.deepcopy(whole), {"scaled": "embedding_rowwise", "linear": "colwise_gather_output"}
        )
    assert any(
        "Scaled keeps its stock forward: its forward is not that of nn.Embedding" in str(w.message)
        for w in caught
    )
    assert isinstance(vars(model["linear"])["forward"], SplitForward)
    assert not isinstance(vars(model["scaled"])["forward"], SplitForward)
    _near("out", model["linear"](model["scaled"](ids)), whole["linear"](whole["scaled"](ids)))


def test_a_module_with_a_forward_of_its_own_keeps_the_stock_style_and_says_so() -> None:
    """Gemma scales its embeddings in a forward of its own: replaced, the scale would be lost."""
    run_distributed(2, _stock_forwards)


class Part(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (dist.get_rank() + 1)


def _sums(rank: int, world_size: int) -> None:
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    norm = nn.LayerNorm(4).double()
    with hf.enable():
        part = _split(nn.ModuleDict({"part": Part(), "norm": copy.deepcopy(norm)}), {
            "part": "all_reduce", "norm": "replicated_with_grad_allreduce",
        })  # fmt: skip
    _near("all_reduce", part["part"](x), x * sum(range(1, world_size + 1)))
    for _ in range(2):  # gradients accumulate
        (part["norm"](x + rank) * x).sum().backward()
        for other in range(world_size):
            (norm(x + other) * x).sum().backward()
    _near("norm", part["norm"].weight.grad, norm.weight.grad)


def test_sums_of_outputs_and_of_gradients() -> None:
    """The stock hook sums the accumulated gradient again in every backward."""
    run_distributed(3, _sums)
