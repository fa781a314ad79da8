"""Models of transformers trained with the sequence split over ranks: losses and gradients of the unsplit model."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import interlace
from interlace.context_parallel import shard_batch
from tests.distributed import run_distributed

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
VOCABULARY = 97


def build(family: str) -> nn.Module:
    import transformers as hf

    torch.manual_seed(0)
    if family == "qwen3":
        return hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES, head_dim=8))
    if family == "mistral":
        return hf.MistralForCausalLM(hf.MistralConfig(**SIZES, sliding_window=7))
    if family == "gemma3":
        layers = ["sliding_attention", "full_attention"]
        return hf.Gemma3ForCausalLM(
            hf.Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=7, layer_types=layers)
        )
    if family == "deepseek_v3":  # values of 6 features beside queries of 8
        latent = {
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 6,
        }
        sizes = {
            **SIZES,
            **latent,
            "num_key_value_heads": 4,
            "num_hidden_layers": 1,
            "first_k_dense_replace": 1,
        }
        return hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**sizes))
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES))


def unsuitable() -> list[nn.Module]:
    """Models that would miss tokens of other ranks: own attention, none, a convolution, other layers."""
    import transformers as hf

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    experts = {"num_local_experts": 2, "intermediate_size": 16}
    return [
        hf.BloomForCausalLM(hf.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=4)),
        hf.FalconForCausalLM(hf.FalconConfig(**sizes)),
        hf.MambaForCausalLM(hf.MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1)),
        hf.Lfm2ForCausalLM(hf.Lfm2Config(**sizes, intermediate_size=16, layer_types=["conv"])),
        hf.MiniMaxForCausalLM(hf.MiniMaxConfig(**sizes, **experts, layer_types=["linear_attention"])),
    ]


def unsplit_loss(model: nn.Module, ids: Tensor, documents: tuple[int, ...] | None) -> Tensor:
    """Mean over all tokens that have a next one, every document by itself."""
    if documents is None:
        return model(input_ids=ids, labels=ids).loss
    sums = [
        F.cross_entropy(model(input_ids=ids[:, b:e]).logits[0, :-1], ids[0, b + 1 : e], reduction="sum")
        for b, e in itertools.pairwise(documents)
        if e - b > 1
    ]
    return torch.stack(sums).sum() / sum(e - b - 1 for b, e in itertools.pairwise(documents))


def same_step(rank: int, world_size: int, family: str) -> None:
    for algorithm, packed in itertools.product(("ring", "all_gather", "all_to_all"), (False, True)):
        model = build(family)
        whole = copy.deepcopy(model)
        ids = torch.randint(
            0, VOCABULARY, (1 if packed else 2, 37), generator=torch.Generator().manual_seed(1)
        )
        documents = (0, 10, 11, 37) if packed else None
        exact = unsplit_loss(whole, ids, documents)
        exact.backward()
        with interlace.hf.enable(context_parallel=dist.group.WORLD, algorithm=algorithm):
            shards = shard_batch({"input_ids": ids, "labels": ids}, None, cu_seqlens=documents)
            loss = model(**shards.inputs, use_cache=False).loss
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        what = f"{family}, {algorithm}, packed {packed}"
        if not abs(mean / world_size - exact) < 1e-5:
            raise AssertionError(f"loss of {what}: {mean / world_size} instead of {exact}")
        for (name, param), (_, unsplit) in zip(
            model.named_parameters(), whole.named_parameters(), strict=True
        ):
            dist.all_reduce(param.grad)
            error = (param.grad / world_size - unsplit.grad).abs().max() / unsplit.grad.abs().max().clamp(
                min=1e-9
            )
            if not error < 5e-5:
                raise AssertionError(f"gradient of {name}, {what}: off by {error:.1e}")


def batches(steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, VOCABULARY, (2, 30), generator=generator) for _ in range(steps)]


def train(model: nn.Module, cp: DeviceMesh | None, algorithm: str, steps: int) -> list[float]:
    """Losses of AdamW; with cp, of the sequence split over that mesh, gradients averaged by DDP."""
    group = None if cp is None else (cp if cp.ndim == 1 else cp._flatten()).get_group()
    network = model if group is None else DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for ids in batches(steps):
        inputs = {"input_ids": ids, "labels": ids}
        if group is not None:
            inputs = {**shard_batch(inputs, cp).inputs, "use_cache": False}
        loss = network(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if group is not None:
            loss = loss.detach().clone()
            dist.all_reduce(loss, group=group)
            loss /= dist.get_world_size(group)
        losses.append(loss.item())
    return losses


def trains_alike(rank: int, world_size: int, kind: str) -> None:
    model = build("llama")
    exact = train(copy.deepcopy(model), None, "", 20)
    if kind == "cp2":
        cp = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))["cp"]
        options = {"context_parallel": cp}
    elif kind == "cp2_tp2":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        cp = mesh["cp"]
        model = interlace.parallelize(model, mesh["tp"])
        options = {"context_parallel": cp}
    else:
        cp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "heads"))
        options = {"context_parallel": cp}
    with interlace.hf.enable(**options):
        ours = train(model, cp, kind, 20)
    worst = max(abs(a - b) for a, b in zip(ours, exact, strict=True))
    if not worst < 1e-4 or not exact[-1] < exact[0]:
        raise AssertionError(f"{kind}: losses differ by {worst:.1e}: {ours} and {exact}")


def refusals(rank: int, world_size: int) -> list[str]:
    model = build("llama")
    ids = torch.arange(24).view(2, 12)
    left = torch.ones(2, 12, dtype=torch.int64)
    left[0, 0] = 0
    model.config.attention_dropout = 0.5
    texts = []
    with interlace.hf.enable(context_parallel=dist.group.WORLD):
        cached = model.eval()(input_ids=ids).past_key_values
        calls = [
            lambda: model(input_ids=ids, attention_mask=left),
            lambda: model(input_ids=ids[:, :1], past_key_values=cached),
            lambda: interlace.hf.enable(context_parallel=dist.group.WORLD),
        ]
        for call in calls:
            try:
                call()
                texts.append("nothing raised")
            except ValueError as error:
                texts.append(str(error))
    try:
        interlace.hf.enable(context_parallel=dist.group.WORLD, algorithm="hierarchical")
    except ValueError as error:
        texts.append(str(error))
    with interlace.hf.enable(context_parallel=dist.group.WORLD):
        for other in unsuitable():
            for call in (other, torch.compile(other, backend="eager")) if not texts[4:] else (other,):
                with pytest.raises(ValueError, match="its sequence cannot be split") as told:
                    call(input_ids=ids, use_cache=False)
            texts.append(str(told.value))
    same = build("llama").eval()(input_ids=ids, attention_mask=left).logits
    texts.append(f"stock again: {bool(same.isfinite().all())}")
    return texts


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3", "deepseek_v3"])
def test_families(family: str) -> None:
    run_distributed(2, same_step, family)


def test_three_ranks() -> None:
    run_distributed(3, same_step, "mistral")


@pytest.mark.parametrize(("kind", "world_size"), [("cp2", 2), ("cp2_tp2", 4), ("two_axes", 4)])
def test_training(kind: str, world_size: int) -> None:
    run_distributed(world_size, trains_alike, kind, timeout=180)


def test_refusals() -> None:
    parts = ("an attention_mask with hidden tokens", "1 queries against", "enabled already", "algorithm='hierarchical'",
             "BloomModel computes attention itself", "FalconModel computes", "MambaModel computes",
             "layers of conv", "layers of linear_attention", "stock again: True")  # fmt: skip
    for text, part in zip(run_distributed(2, refusals)[0], parts, strict=True):
        assert part in text, (part, text)


def test_masks_that_say_more_than_causal_window_and_documents() -> None:
    from transformers import masking_utils as masks

    from interlace.context_parallel.suitable import check_mask

    causal, window = masks.causal_mask_function, masks.sliding_window_causal_mask_function(3)
    documents = masks.packed_sequence_mask_function(torch.zeros(1, 4))
    for known in (causal, window, masks.and_masks(causal, documents), masks.bidirectional_mask_function):
        check_mask(known)
    prefix = masks.or_masks(causal, lambda batch, head, q, kv: kv < 2)
    chunked = masks.chunked_causal_mask_function(2, torch.zeros(1))
    for other in (prefix, chunked, masks.and_masks(window, lambda batch, head, q, kv: kv != 1)):
        with pytest.raises(ValueError, match="the model masks its attention by"):
            check_mask(other)
