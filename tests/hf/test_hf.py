"""transformers' own tensor parallelism on our ops, against the same model on one process."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication

from interlace import hf
from interlace.counting import count_ops
from interlace.parallelize.report import report
from interlace.paths import last_path
from interlace.styles.parameters import SplitForward
from tests.distributed import run_distributed

pytest.importorskip("transformers")
LIMIT = 1e-5


def _config(family: str, **options: Any) -> Any:
    import transformers

    sizes = {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 4,
        "max_position_embeddings": 64, "pad_token_id": 0,
    }  # fmt: skip
    return getattr(transformers, f"{family}Config")(**{**sizes, **options})


def _save(family: str, folder: str, **options: Any) -> None:
    """A random model with nothing at ones or zeros, as a checkpoint on disk."""
    import transformers

    torch.manual_seed(7)
    model = getattr(transformers, f"{family}ForCausalLM")(_config(family, **options))
    for param in model.parameters():
        param.data.add_(torch.randn_like(param) * 0.05)
    model.tie_weights()
    model.save_pretrained(folder)


@contextmanager
def _torchrun() -> Iterator[None]:
    """The variables of torchrun, which from_pretrained reads."""
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    with mock.patch.dict(os.environ, {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}):
        yield


def _load(folder: str, split: bool) -> Any:
    import transformers

    if not split:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with _torchrun():
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, tp_plan="auto")


def _ids(length: int = 7) -> Tensor:
    return torch.randint(1, 61, (2, length), generator=torch.Generator().manual_seed(1))


def _near(what: str, found: Tensor, expected: Tensor) -> None:
    """Relative Frobenius norm, the limit of the tests that transformers has for its own styles."""
    found = found.full_tensor() if isinstance(found, DTensor) else found
    assert found.shape == expected.shape, f"{what}: {tuple(found.shape)}, expected {tuple(expected.shape)}"
    error = ((found - expected).norm() / expected.norm().clamp_min(1e-6)).item()
    assert error < LIMIT, f"{what}: relative error {error:.2e}"


def _backward(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    return out.logits.detach(), out.loss.detach()


def _check_training(model: nn.Module, whole: nn.Module, times: int = 2) -> None:
    """Logits, loss and gradients, accumulated over `times` backward passes."""
    for _ in range(times):
        found, expected = _backward(model, _ids()), _backward(whole, _ids())
        _near("logits", found[0], expected[0])
        _near("loss", found[1], expected[1])
    named = {name.replace("base_model.model.", ""): param for name, param in model.named_parameters()}
    for name, param in whole.named_parameters():
        name = name.replace("base_model.model.", "")
        assert (named[name].grad is None) == (param.grad is None), name
        if param.grad is not None:
            _near(f"gradient of {name}", named[name].grad, param.grad)


def _family(rank: int, world_size: int, folder: str) -> None:
    whole = _load(folder, split=False)
    with hf.enable() as enabled:
        assert {"colwise", "rowwise", "embedding_rowwise", "packed_colwise"} <= set(enabled.ours)
        model = _load(folder, split=True)
    rows = hf.report(model)
    assert rows and all(row.ours for row in rows), "\n".join(map(str, rows))
    assert {row.source for row in report(model).rows} == {"transformers"}
    with count_ops() as counts:
        _check_training(model, whole)
    layers = whole.config.num_hidden_layers
    dense = whole.config.model_type != "mixtral"
    # two passes: o_proj and down_proj of every layer; q, k, v, gate, up and the head sum in the backward
    assert counts.forward["gemm_all_reduce"] == 2 * layers * (1 + dense), str(counts)
    assert counts.backward["gemm_all_reduce"] >= 2 * layers * (3 + 2 * dense), str(counts)
    assert last_path().fused, last_path()


@pytest.mark.parametrize(("family", "world_size"), [("Llama", 2), ("Qwen3", 2), ("Mixtral", 2)])
def test_a_checkpoint_loaded_by_tp_plan_auto_runs_on_our_ops(family: str, world_size: int) -> None:
    """The stock loader, the stock plan: logits, loss and all gradients over two accumulated steps. Qwen3 has norms of
    q and k, whose gradients the stock style counts twice when they accumulate."""
    with tempfile.TemporaryDirectory() as folder:
        _save(family, folder, tie_word_embeddings=family == "Llama")
        run_distributed(world_size, _family, folder, timeout=120.0)


def _generation(rank: int, world_size: int, folder: str) -> None:
    whole = _load(folder, split=False)
    with hf.enable():
        model = _load(folder, split=True)
    for cache in ("dynamic", "static"):
        options = {
            "max_new_tokens": 6,
            "do_sample": False,
            "cache_implementation": cache,
            "disable_compile": True,
        }
        expected = whole.generate(_ids(5), **options)
        assert torch.equal(model.generate(_ids(5), **options), expected), cache
    saved = os.path.join(folder, "again")
    model.save_pretrained(saved)
    dist.barrier()
    again = _load(saved, split=False)
    for name, param in whole.named_parameters():
        assert torch.equal(again.get_parameter(name), param), name


def test_generate_and_save() -> None:
    """Greedy tokens with both caches; the checkpoint written by two ranks is the one they read."""
    with tempfile.TemporaryDirectory() as folder:
        _save("Llama", folder)
        run_distributed(2, _generation, folder, timeout=120.0)


def _adapters(rank: int, world_size: int, folder: str) -> None:
    from peft import LoraConfig, get_peft_model

    models = []
    for split in (False, True):
        base = _load(folder, split)
        torch.manual_seed(3)
        config = LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=["q_proj", "v_proj", "o_proj", "down_proj"],
            init_lora_weights=False,
        )
        models.append(get_peft_model(base, config))
    whole, model = models
    weights = dict(whole.named_parameters())
    with torch.no_grad():  # random adapters are drawn after the base was split: give both the same
        for name, param in model.named_parameters():
            if "lora_" in name:
                _fill(param, weights[name])
    _check_training(model, whole, times=1)
    optimizers = [torch.optim.AdamW((p for p in m.parameters() if p.requires_grad), lr=1e-2) for m in models]
    for _ in range(3):
        for one, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            _backward(one, _ids())
            optimizer.step()
    _near("logits after training", model(input_ids=_ids()).logits, whole(input_ids=_ids()).logits)
    with implicit_replication():  # PEFT multiplies a split adapter half with a whole one
        merged = model.merge_and_unload()
    _near("logits after merging", merged(input_ids=_ids()).logits, whole(input_ids=_ids()).logits)


def _fill(param: Tensor, value: Tensor) -> None:
    if not isinstance(param, DTensor):
        param.copy_(value)
        return
    from torch.distributed.tensor import distribute_tensor

    param.copy_(distribute_tensor(value.detach(), param.device_mesh, param.placements, src_data_rank=None))


def test_lora_adapters_train_and_merge_as_unsplit_ones() -> None:
    """Adapters on column and row layers: PEFT knows how to cut them because the style names are the stock ones."""
    pytest.importorskip("peft")
    with tempfile.TemporaryDirectory() as folder:
        _save("Llama", folder)
        run_distributed(2, _with_adapters, folder, timeout=120.0)


def _with_adapters(rank: int, world_size: int, folder: str) -> None:
    with hf.enable():
        _adapters(rank, world_size, folder)


def _reversible(rank: int, world_size: int, folder: str) -> None:
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES as registry
    from transformers.distributed.tensor_parallel import ColwiseParallel

    before = {name: registry[name] for name in registry}
    registry["rowwise"] = custom = copy.copy(before["rowwise"])  # a local override of the user's
    try:
        enabled = hf.enable()
        assert "colwise                        interlace" in str(enabled) and "replicate" in enabled.stock
        assert len(enabled.ours) >= 10 and type(registry["colwise"]) is not ColwiseParallel
        with pytest.raises(ValueError, match="enabled already"):
            hf.enable()
        hf.disable()
        assert registry["rowwise"] is custom
    finally:
        del registry["rowwise"]
    assert {name: registry[name] for name in registry} == before
    with pytest.raises(ValueError, match="not enabled"):
        hf.disable()
    model = _load(folder, split=True)
    assert not any(isinstance(vars(m).get("forward"), SplitForward) for m in model.modules())
    assert not any(row.ours for row in hf.report(model))
    with pytest.raises(ValueError, match="was not split by transformers"):
        hf.report(_load(folder, split=False))


def test_disable_gives_the_stock_styles_back() -> None:
    with tempfile.TemporaryDirectory() as folder:
        _save("Llama", folder)
        run_distributed(2, _reversible, folder)
