"""Split Hugging Face models under what people put around them: compile, autocast, checkpointing, adapters, masks."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interlace.checkpoint import full_grads, full_state_dict
from interlace.functional import copy_to_region
from interlace.parallelize.api import parallelize
from tests.distributed import run_distributed
from tests.parallelize import models

pytest.importorskip("transformers")


def _ids(batch: int = 2, length: int = 6) -> Tensor:
    return torch.randint(1, 61, (batch, length), generator=torch.Generator().manual_seed(1))


def _compiled(rank: int, world_size: int) -> None:
    for family, sequence in (("llama", False), ("qwen3", True)):
        whole = models.make(family, 4, 1)
        split = parallelize(copy.deepcopy(whole), None, sequence_parallel=sequence)
        torch._dynamo.reset()
        compiled = torch.compile(split, fullgraph=True, dynamic=False, backend="aot_eager")
        for length in (6, 5):
            expected, whole_loss = models.loss_of(whole, _ids(length=length))
            found, loss = models.loss_of(compiled, _ids(length=length))
            models.assert_near(f"{family}, {length} tokens", found, expected)
            for model, value in ((whole, whole_loss), (split, loss)):
                model.zero_grad()
                value.backward()
            grads = {name: param.grad for name, param in split.named_parameters()}
            modules = dict(split.named_modules())
            for name, param in whole.named_parameters():
                want = models.own_part(param.grad, modules[name.rpartition(".")[0]], name)
                models.assert_near(f"{family}, {length} tokens: {name}", grads[name], want)


def test_a_split_model_compiles_without_graph_breaks() -> None:
    """Shared products, summed norms and sequence hooks are Python around the ops: dynamo must see through them."""
    run_distributed(2, _compiled, timeout=240.0)


def _checkpointed(rank: int, world_size: int, sequence_parallel: bool) -> None:
    for family in ("qwen3", "bert"):
        model = models.make(family)
        whole = copy.deepcopy(model).train()
        whole.config.update(dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0))
        split = parallelize(model, None, sequence_parallel=sequence_parallel).train()
        for module in (*whole.modules(), *split.modules()):
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        split.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for _ in range(2):  # gradients accumulate
            for one in (whole, split):
                models.loss_of(one, _ids(length=7))[1].backward()
        modules = dict(split.named_modules())
        for name, param in whole.named_parameters():
            want = models.own_part(param.grad, modules[name.rpartition(".")[0]], name)
            models.assert_near(name, split.get_parameter(name).grad, want)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_activation_checkpointing_and_accumulation_give_the_same_gradients(sequence_parallel: bool) -> None:
    """The recomputed forward runs the collectives again, in the backward, in the same order on all ranks."""
    run_distributed(3, _checkpointed, sequence_parallel)


class Adapter(nn.Module):
    """A low-rank adapter beside a frozen linear; beside a split one, its branch begins with `copy_to_region`."""

    def __init__(self, base: nn.Linear, out_features: int) -> None:
        super().__init__()
        self.base = base
        self.split = False
        generator = torch.Generator().manual_seed(9)
        self.down = nn.Parameter(torch.randn(2, base.in_features, generator=generator, dtype=torch.float64))
        self.up = nn.Parameter(torch.randn(out_features, 2, generator=generator, dtype=torch.float64) / 10)

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        low, down = x, self.down
        if self.split:
            low, down = (copy_to_region(t, group=self.base.group_name) for t in (x, self.down))
        return self.base(x, *args, **kwargs) + F.linear(F.linear(low, down), self.up)


def _adapted(rank: int, world_size: int) -> None:
    whole = models.make("llama", 4, 2).requires_grad_(False)
    split = parallelize(copy.deepcopy(whole), None)
    for model in (whole, split):
        for layer in model.model.layers:
            attention = layer.self_attn
            attention.k_proj = Adapter(attention.k_proj, attention.k_proj.out_features)
            if model is split:
                linear = attention.k_proj.base
                start, end = linear.shards.bounds(rank)
                attention.k_proj.split = True
                attention.k_proj.up = nn.Parameter(attention.k_proj.up.data[start:end].clone())
    results = []
    for model in (whole, split):
        logits, loss = models.loss_of(model, _ids())
        loss.backward()
        results.append(logits)
    models.assert_near("logits", results[1], results[0])
    for ours, theirs in zip(split.model.layers, whole.model.layers, strict=True):
        start, end = ours.self_attn.k_proj.base.shards.bounds(rank)
        models.assert_near("up", ours.self_attn.k_proj.up.grad, theirs.self_attn.k_proj.up.grad[start:end])
        models.assert_near("down", ours.self_attn.k_proj.down.grad, theirs.self_attn.k_proj.down.grad)
    assert all(p.grad is None for n, p in split.named_parameters() if not n.endswith(("up", "down")))


def test_an_adapter_around_one_of_three_shared_projections_is_right() -> None:
    """The wrapper calls k with the same input: it must get k's product, and the frozen base must pass dX on."""
    run_distributed(2, _adapted)


def _masked(rank: int, world_size: int) -> None:
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, 4:] = 0
    for family in ("bert", "llama"):
        for attention in ("sdpa", "eager"):
            models.check_split(models.make(family, 6, 3, attention=attention), _ids(length=7), mask)


def test_padding_masks_hold_for_local_heads() -> None:
    run_distributed(2, _masked)


def _autocast(rank: int, world_size: int) -> None:
    model = models.make("llama").float()
    split = parallelize(copy.deepcopy(model), None)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = model(input_ids=_ids()).logits, split(input_ids=_ids()).logits
    assert found.dtype == expected.dtype
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    assert error < 0.03, f"relative error {error}"  # bf16 rounds at 0.004, a dozen layers deep
    found.float().sum().backward()
    assert all(param.grad.dtype == torch.float32 for param in split.parameters())


def test_autocast_runs_the_split_model_in_bf16() -> None:
    run_distributed(2, _autocast)


def _unknown(rank: int, world_size: int) -> None:
    import transformers

    small = {"vocab_size": 61, "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 6}
    for name, reason in (
        ("DebertaV2", "no stack of layers with attention blocks"),
        ("Albert", "LayerNorm has parameters that are not one value per element of a head"),
        ("MPNet", "takes position_bias, which holds values for all heads"),
    ):
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**small))
        with pytest.raises(
            ValueError, match=f"{name}Model is not an architecture that .*{reason}.*Pass plan="
        ):
            parallelize(model, None)


def test_a_family_that_is_not_understood_is_refused_with_the_reason() -> None:
    """Split as if they were Llama, these would give wrong numbers or crash in the middle of a forward."""
    run_distributed(2, _unknown)


def _saved(rank: int, world_size: int, folder: str) -> None:
    for family in ("llama", "gemma"):
        whole = models.make(family)
        split = parallelize(copy.deepcopy(whole), None)
        place = f"{folder}/{family}"
        for model in (split, copy.deepcopy(split), split.base_model):
            with pytest.raises(RuntimeError, match=r"shards of one rank; call interlace\.save_full"):
                model.save_pretrained(f"{folder}/shards")
        full = full_state_dict(split)
        if rank == 0:
            split.save_pretrained(place, state_dict=full)
        torch.distributed.barrier()
        again = type(whole).from_pretrained(place).to(whole.dtype).eval()
        models.assert_near(family, models.loss_of(again, _ids())[0], models.loss_of(whole, _ids())[0])
        assert not os.path.exists(f"{folder}/shards")
        whole.save_pretrained(f"{folder}/whole{rank}")  # a model that is not split


def test_save_pretrained_writes_the_whole_model_or_nothing(tmp_path: Path) -> None:
    run_distributed(2, _saved, str(tmp_path))


def _attentions(rank: int, world_size: int) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 6, "decoder_attention_heads": 4}
    bart = transformers.BartConfig(vocab_size=61, d_model=24, max_position_embeddings=16, **sizes, **heads)
    ids = _ids()
    for whole in (
        models.make("llama", 6, 3),
        models.make("bert", 6),
        transformers.BartForConditionalGeneration(bart).double().eval(),
    ):
        whole.set_attn_implementation("eager")
        split = parallelize(copy.deepcopy(whole), None)
        expected = whole(input_ids=ids, output_attentions=True)
        found = split(input_ids=ids, output_attentions=True)
        for name in [name for name in expected if "attentions" in name]:
            for layer, (got, want) in enumerate(zip(found[name], expected[name], strict=True)):
                models.assert_near(f"{type(whole).__name__}, {name} of layer {layer}", got, want)
        last = [name for name in expected if "attentions" in name][-1]
        for one, output in ((whole, expected), (split, found)):
            one.zero_grad()
            output[last][0][:, -1].square().sum().backward()
        for name, grad in full_grads(split).items():
            want = whole.get_parameter(name).grad
            if want is not None and want.norm() > 1e-6:
                models.assert_near(name, grad, want)


def test_attention_weights_are_those_of_all_heads() -> None:
    run_distributed(3, _attentions)
