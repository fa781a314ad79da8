"""PEFT's LoRA on split models: trained, merged and saved as on the unsplit model, whenever it was put on."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import interlace
from interlace.functional import copy_to_region
from interlace.modules import ColumnParallelLinear, RowParallelLinear, SummedGradients
from interlace.parallelize import parallelize, report, split_adapters
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


def _dropped(rank: int, world_size: int, sequence_parallel: bool) -> None:
    for attention_dropout in (0.0, 0.3):
        _check_dropped(rank, world_size, sequence_parallel, attention_dropout)


def _check_dropped(rank: int, world_size: int, sequence_parallel: bool, attention_dropout: float) -> None:
    model = llama(4, 1, attention_dropout=attention_dropout)
    model = parallelize(model, None, sequence_parallel=sequence_parallel)
    model = split_adapters(_adapted(model, lora_dropout=0.5)).train()
    # seeded apart, where nothing else drops anything; shards draw different amounts
    torch.manual_seed(1 if attention_dropout else rank)
    losses = train(model)
    assert losses[0] != train(copy.deepcopy(model), steps=1)[0]
    everyone: list[object] = [None] * world_size
    torch.distributed.all_gather_object(everyone, losses)
    assert everyone == [losses] * world_size, "ranks have different losses"
    compared = 0
    for name, module in model.named_modules():
        if type(module) in (nn.Linear, SummedGradients) and "lora" in name:
            weights = [torch.empty_like(module.weight) for _ in range(world_size)]
            torch.distributed.all_gather(weights, module.weight.detach())
            assert all(torch.equal(weight, weights[0]) for weight in weights), f"{name} differs between ranks"
            compared += 1
    assert compared == 10
    with torch.no_grad():
        assert torch.equal(model.eval()(ids()).logits, model(ids()).logits)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_before_an_adapter_keeps_the_replicas_equal(sequence_parallel: bool) -> None:
    """Masks of a replicated input that differ between ranks would train a different A on each of them."""
    run_distributed(3, _dropped, sequence_parallel)


class Branch(nn.Module):
    """An adapter of one's own: knows of tensor parallelism, nothing of sequences that are cut."""

    def __init__(self, base: nn.Linear, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.base = weight, base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = isinstance(self.base, ColumnParallelLinear)
        branch = copy_to_region(x, group=self.base.group_name) if split else x
        return self.base(x) + branch @ self.weight.t()


def _own(rank: int, world_size: int) -> None:
    whole = llama(4, 1)
    split = parallelize(copy.deepcopy(whole), None, sequence_parallel=True)
    torch.manual_seed(2)
    for ours, theirs in zip(split.model.layers, whole.model.layers, strict=True):
        weight = torch.randn_like(theirs.self_attn.q_proj.weight) / 10
        layout = ours.self_attn.q_proj.parameter_layouts()["weight"]
        for attention, own in (
            (theirs.self_attn, weight),
            (ours.self_attn, layout.take(weight, rank).clone()),
        ):
            attention.q_proj = Branch(attention.q_proj, nn.Parameter(own))
    for model in (whole, split):
        train(model, steps=1, lr=0.0)
    for name in ("weight", "base.weight"):
        found, expected = (
            m.model.layers[0].self_attn.q_proj.get_parameter(name).grad for m in (split, whole)
        )
        assert_near(name, found, layout.take(expected, rank))
    norm = "model.layers.0.input_layernorm.weight"
    assert_near(norm, split.get_parameter(norm).grad, whole.get_parameter(norm).grad)


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_adapter_of_ones_own_reads_the_gathered_input_of_attention(world_size: int) -> None:
    """Attention runs on a stand-in for its gathered input; whoever wraps a projection must get real values."""
    run_distributed(world_size, _own)


def _transposed(rank: int, world_size: int) -> None:
    import transformers

    torch.manual_seed(3)
    config = transformers.GPT2Config(vocab_size=61, n_embd=24, n_head=4, n_layer=2, n_positions=32)
    base = transformers.GPT2LMHeadModel(config).double().eval()
    targets = ["c_attn", "c_proj", "c_fc"]
    whole = _adapted(copy.deepcopy(base), targets, fan_in_fan_out=True)
    split = parallelize(copy.deepcopy(whole), None)
    assert_near("losses", torch.tensor(train(split)), torch.tensor(train(whole)))
    assert_parameters_near("packed and transposed", split, whole, rank, grads=False)
    assert_near("merged", split.merge_and_unload()(ids()).logits, whole.merge_and_unload()(ids()).logits)
    late = _adapted(parallelize(copy.deepcopy(base), None), targets, fan_in_fan_out=True)
    with pytest.raises(ValueError, match="made for this rank's shard; add adapters before parallelize"):
        split_adapters(late)


@pytest.mark.parametrize("world_size", [2, 3])
def test_adapters_of_packed_transposed_linears_are_split_alike(world_size: int) -> None:
    """GPT-2: q, k and v in one matrix, which PEFT measures by the shard that it finds."""
    run_distributed(world_size, _transposed)


def _saved(rank: int, world_size: int, folder: str) -> None:
    """What a split model saves is a plain PEFT adapter, and the other way round."""
    base = llama(4, 1)
    whole = _adapted(copy.deepcopy(base))
    split = parallelize(copy.deepcopy(whole), None)
    full = interlace.full_state_dict(split)
    expected = peft.get_peft_model_state_dict(whole)
    found = peft.get_peft_model_state_dict(split, state_dict=full)
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    if rank == 0:
        split.save_pretrained(folder, state_dict=full)
    torch.distributed.barrier()
    want = whole(ids()).logits
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), folder).double()
    assert_near("loaded into the unsplit model", loaded(ids()).logits, want)
    again = peft.PeftModel.from_pretrained(parallelize(copy.deepcopy(base), None), folder).double()
    assert_near("loaded into a split model", split_adapters(again)(ids()).logits, want)


def test_adapters_are_saved_whole_and_load_anywhere(tmp_path: Path) -> None:
    run_distributed(2, _saved, str(tmp_path))


def _refused(rank: int, world_size: int) -> None:
    layer = llama(4, 1, num_hidden_layers=1)
    dora = _adapted(copy.deepcopy(layer), use_dora=True)
    with pytest.raises(ValueError, match="DoraLinearVariant reads the whole weight"):
        parallelize(dora, None)
    assert isinstance(dora.base_model.model.model.layers[0].self_attn.q_proj.base_layer, nn.Linear)
    assert not any(isinstance(module, ColumnParallelLinear) for module in dora.modules()), "changed in part"
    with pytest.raises(ValueError, match="has no split modules"):
        split_adapters(_adapted(copy.deepcopy(layer)))
    late = _adapted(parallelize(copy.deepcopy(layer), None), ["k_proj"])
    assert "call interlace.split_adapters(model)" in str(report(late))
    with pytest.raises(ValueError, match=r"added after parallelize; call interlace\.split_adapters"):
        late(
            ids()
        )  # every rank holds the one kv head: the shapes of whole adapters fit, their gradients do not
    assert "adapter" in {row.source for row in report(split_adapters(late)).rows}
    late(ids()).logits.sum().backward()
    different = _adapted(parallelize(copy.deepcopy(layer), None))
    for name, param in different.named_parameters():
        if name.endswith("layers.0.mlp.down_proj.lora_A.default.weight"):
            param.data.add_(rank)
    with pytest.raises(ValueError, match="ranks 0 and 1 hold different models"):
        split_adapters(different)


def test_adapters_that_cannot_be_split_or_were_not_are_refused() -> None:
    """DoRA's norms of a shard, whole adapters on shards, replicas that start apart: each would train silently."""
    run_distributed(2, _refused)
