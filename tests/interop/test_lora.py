"""PEFT's LoRA on split models: trained, merged and saved as on the unsplit model, whenever it was put on."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from interlace.modules import ColumnParallelLinear, RowParallelLinear
from interlace.parallelize import parallelize, split_adapters
from tests.distributed import run_distributed
from tests.interop.models import assert_parameters_near, ids, llama, train
from tests.parallelize.models import assert_near

peft = pytest.importorskip("peft")
TARGETS = [
    "q_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "down_proj",
]  # columns and rows, some of those that share


def _adapted(model: nn.Module, targets: list[str] = TARGETS, **options: object) -> nn.Module:
    """The model with adapters that are not zero, the same on every rank."""
    torch.manual_seed(11)
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets, init_lora_weights=False, **options)
    return peft.get_peft_model(model, config).double()


def _trained(rank: int, world_size: int, heads: int, kv_heads: int, sequence_parallel: bool) -> None:
    base = llama(heads, kv_heads)
    whole = _adapted(copy.deepcopy(base))
    before = parallelize(_adapted(copy.deepcopy(base)), None, sequence_parallel=sequence_parallel)
    after = parallelize(copy.deepcopy(base), None, sequence_parallel=sequence_parallel)
    after = split_adapters(_adapted(after))
    expected = train(whole)
    for what, split in (("before", before), ("after", after)):
        what = f"adapters {what} parallelize, sequence_parallel={sequence_parallel}"
        losses = train(split)
        assert_near(what, torch.tensor(losses), torch.tensor(expected))
        assert_parameters_near(what, split, whole, rank, grads=True)
        assert_parameters_near(what, split, whole, rank, grads=False)
        layer = split.base_model.model.model.layers[0]
        assert isinstance(layer.self_attn.q_proj.lora_B["default"], ColumnParallelLinear)
        assert isinstance(layer.mlp.down_proj.lora_A["default"], RowParallelLinear)
        merged, whole_merged = split.merge_and_unload(), copy.deepcopy(whole).merge_and_unload()
        assert not any("lora" in name for name, _ in merged.named_parameters())
        assert_parameters_near(f"{what}, merged", merged, whole_merged, rank, grads=False)
        with torch.no_grad():
            assert_near(f"{what}, merged", merged(ids()).logits, whole_merged(ids()).logits)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("world_size", "heads", "kv_heads"), [(2, 6, 3), (3, 4, 1)])
def test_adapters_train_and_merge_as_on_the_unsplit_model(
    world_size: int, heads: int, kv_heads: int, sequence_parallel: bool
) -> None:
    """Catches adapters that stay whole beside shards, and replicated halves whose gradients are a rank's part."""
    run_distributed(world_size, _trained, heads, kv_heads, sequence_parallel)
