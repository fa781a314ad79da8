"""Whole checkpoints into split models: from memory and files, into models on the meta device, and back to files."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import interlace
from interlace.checkpoint import load_full_state_dict, materialise, save_full
from interlace.checkpoint.entries import entries_of
from interlace.checkpoint.load import _copy, _Plan
from interlace.checkpoint.source import FullCheckpoint, open_source
from interlace.modules import ColumnParallelLinear, RowParallelLinear, layouts_of
from tests.checkpoint.models import Net, assert_shards, split
from tests.distributed import run_distributed
from tests.parallelize.models import make


def _on_meta(world_size: int) -> Net:
    with torch.device("meta"):
        model = split(Net(), world_size)
    assert all(p.is_meta for p in model.parameters())
    return model


def _load(rank: int, world_size: int, folder: str) -> None:
    whole, path = Net(), Path(folder)
    if rank == 0:
        torch.save(whole.state_dict(), path / "whole.pt")
    interlace.checkpoint.save_full(split(whole, world_size), path / "one")
    interlace.checkpoint.save_full(split(whole, world_size), path / "many", max_shard_size=600)
    assert len(list((path / "many").glob("*.safetensors"))) > 5
    index = path / "many" / "model.safetensors.index.json"
    sources: list[Any] = [whole.state_dict(), path / "whole.pt", path / "one", str(path / "many"), index]
    for source in sources:
        model = split(Net(8), world_size)
        parameters = {name: id(param) for name, param in model.named_parameters()}
        result = load_full_state_dict(model, source)
        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        assert_shards(model, whole.state_dict(), rank)
        assert torch.equal(model.layers[1].scale, whole.layers[1].scale)
        assert parameters == {name: id(param) for name, param in model.named_parameters()}
    model = _on_meta(world_size).bfloat16()
    model.layers[0].q.weight.requires_grad_(False)
    for block in model.layers:
        block.cached = torch.ones(2)
    load_full_state_dict(model, path / "many")
    assert_shards(model, whole.state_dict(), rank)
    assert model.head.weight is model.embed.weight and model.layers[0].scale.dtype == torch.bfloat16
    assert not model.layers[0].q.weight.requires_grad and model.layers[1].q.weight.requires_grad


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_takes_its_slices_of_a_whole_checkpoint(world_size: int, tmp_path: Path) -> None:
    """From a dict, torch.save, one file, a folder of many, an index; in place, or from the meta device."""
    run_distributed(world_size, _load, str(tmp_path))


def _mistakes(rank: int, world_size: int, folder: str) -> None:
    whole = Net()
    state = whole.state_dict()
    model = split(Net(8), world_size)
    before = model.layers[0].norm.weight.detach().clone()
    wrong = {**state, "layers.0.norm.bias": torch.zeros(4), "extra": torch.zeros(1)}
    del wrong["layers.1.q.bias"], wrong["head.weight"]
    with pytest.raises(RuntimeError) as ours:
        load_full_state_dict(model, wrong)
    with pytest.raises(RuntimeError) as torchs:
        Net().load_state_dict(wrong | {"head.weight": state["head.weight"]})
    for line in str(torchs.value).splitlines()[1:3]:
        assert line in str(ours.value), (line, str(ours.value))
    assert "size mismatch for layers.0.norm.bias" in str(ours.value)
    assert torch.equal(before, model.layers[0].norm.weight), "half loaded"
    del wrong["layers.0.norm.bias"]
    found = load_full_state_dict(model, wrong, strict=False)
    assert found.missing_keys == ["layers.0.norm.bias", "layers.1.q.bias"] and found.unexpected_keys == [
        "extra"
    ]
    shard = {**state, "layers.0.q.weight": model.layers[0].q.weight}
    with pytest.raises(RuntimeError, match=r"size mismatch for layers.0.q.weight"):
        load_full_state_dict(model, shard)
    missing = Path(folder) / ("nothing.safetensors" if rank else "")
    with pytest.raises(
        (FileNotFoundError, RuntimeError), match="rank 1 cannot: .*no file" if not rank else "no file"
    ):
        load_full_state_dict(model, missing if rank else state)
    with pytest.raises(FileNotFoundError, match="has none of"):
        load_full_state_dict(model, Path(folder))
    lost = _on_meta(world_size)
    with pytest.raises(
        ValueError, match=r"layers.0.cached, layers.1.cached are on the meta device, in no checkpoint"
    ):
        load_full_state_dict(lost, state)
    with pytest.raises(ValueError, match="max_shard_size='many'"):
        save_full(model, folder, max_shard_size="many")


def test_mistakes_are_told_as_torch_tells_them_on_every_rank(tmp_path: Path) -> None:
    """With torch's words, before anything is copied; a file that one rank lacks stops all."""
    run_distributed(2, _mistakes, str(tmp_path))


class Peak(TorchDispatchMode):
    """Bytes of the storages that live at most at once, of those that come up while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((out, args)):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                if storage._cdata not in self.seen:
                    self.seen.add(storage._cdata)
                    self.now += storage.nbytes()
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return out

    def _gone(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList([nn.Linear(256, 1024, bias=False) for _ in range(4)])
        self.down = nn.ModuleList([nn.Linear(1024, 256, bias=False) for _ in range(4)])


def _memory(rank: int, world_size: int, folder: str) -> None:
    with torch.device("meta"):
        model = Wide()
        for up, down in zip(range(4), range(4), strict=True):
            model.up[up] = ColumnParallelLinear.from_linear(model.up[up])
            model.down[down] = RowParallelLinear.from_linear(model.down[down])
    model.bfloat16()  # the files hold fp32: nothing stays mapped
    entries = entries_of(model)
    with FullCheckpoint() as checkpoint, torch.no_grad():
        open_source("test", Path(folder), checkpoint)
        plan = _Plan(model, entries, checkpoint)
        with Peak() as peak:
            _copy(model, plan, torch.device("cpu"))
        shard = sum(p.numel() * p.element_size() for p in model.parameters())
        assert checkpoint.bytes_read == 2 * shard, (
            f"read {checkpoint.bytes_read} bytes for a shard of {shard}"
        )
    tensor = 256 * 1024 * 4
    assert shard <= peak.most <= shard + tensor + 4096, f"{peak.most} bytes for {shard} + {tensor}"


def test_a_rank_reads_its_shard_and_holds_one_tensor_more(tmp_path: Path) -> None:
    """Catches reading whole tensors, or keeping them: 8 MiB of weights over 4 ranks, converted to bf16."""
    torch.manual_seed(0)
    save_full(Wide(), tmp_path)
    run_distributed(4, _memory, str(tmp_path))


def _hugging_face(rank: int, world_size: int, folder: str) -> None:
    import transformers

    path = Path(folder)
    for family, tied in (("llama", True), ("gemma3", False), ("bert", True)):
        whole = make(family, tie_word_embeddings=tied).float()
        if rank == 0:
            whole.save_pretrained(path / family, max_shard_size="20KB")
        torch.distributed.barrier()
        with torch.device("meta"):
            model = type(whole)(whole.config).eval()
        interlace.parallelize(model, None)
        load_full_state_dict(model, path / family)
        assert not [n for n, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
        ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7]])
        torch.testing.assert_close(
            model(input_ids=ids).logits, whole(input_ids=ids).logits, rtol=1e-4, atol=1e-5
        )
        for name, buffer in whole.named_buffers():
            assert torch.equal(buffer, dict(model.named_buffers())[name]), name
        save_full(model, path / f"{family}-back", max_shard_size="30KB")
        again = type(whole).from_pretrained(path / f"{family}-back").eval()
        assert (
            transformers.AutoConfig.from_pretrained(path / f"{family}-back").model_type
            == whole.config.model_type
        )
        for name, value in whole.state_dict().items():
            assert torch.equal(value, again.state_dict()[name]), name
        base = type(whole.base_model)(whole.config)
        layouts = layouts_of(interlace.parallelize(base, None))
        if family != "bert":  # its base model has a pooler that the model with a head has not
            load_full_state_dict(base, path / family, strict=False)
            for name, value in base.named_parameters():
                expected = whole.base_model.get_parameter(name).detach()
                expected = layouts[name].take(expected, rank) if name in layouts else expected
                assert torch.equal(value.detach(), expected), name


@pytest.mark.parametrize("world_size", [2, 4])
def test_hugging_face_checkpoints_load_on_meta_and_are_written_back(world_size: int, tmp_path: Path) -> None:
    """Rotary frequencies and position ids are computed; ties stay; prefixes of base models are found."""
    run_distributed(world_size, _hugging_face, str(tmp_path))


def test_materialise_allocates_and_keeps_ties() -> None:
    """What torch.distributed.checkpoint loads into must have memory; torch's to_empty would untie."""
    with torch.device("meta"):
        model = Net()
    with pytest.raises(ValueError, match="cached"):
        materialise(model)
    for block in model.layers:
        block.cached = torch.ones(2)
    assert materialise(model) is model
    assert not any(t.is_meta for t in model.state_dict().values())
    assert model.head.weight is model.embed.weight and torch.equal(model.layers[0].cached, torch.ones(2))


def test_an_index_that_lies_is_named(tmp_path: Path) -> None:
    """A shard that was cut off or exchanged lacks tensors that the index promises."""
    save_full(Net(), tmp_path, max_shard_size=600)
    index = tmp_path / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    first = next(iter(listed["weight_map"].values()))
    listed["weight_map"]["ghost"] = first
    index.write_text(json.dumps(listed))
    with pytest.raises(ValueError, match="lacks ghost, which the index places there"):
        load_full_state_dict(Net(), tmp_path)


def _mapped(rank: int, world_size: int, folder: str) -> None:
    path = Path(folder)
    whole = Wide()
    load_full_state_dict(whole, path)
    before = {name: value.clone() for name, value in whole.state_dict().items()}
    with torch.device("meta"):
        model = Wide()
        for place in range(4):
            model.up[place] = ColumnParallelLinear.from_linear(model.up[place])
            model.down[place] = RowParallelLinear.from_linear(model.down[place])
    load_full_state_dict(model, path)
    up = model.up[0].weight
    assert up.untyped_storage().nbytes() == up.numel() * 4, (
        "saves and copies would take the whole tensor along"
    )
    with torch.no_grad():
        up.add_(1)
    save_full(model, path)  # over the files that the parameters are mapped from
    changed = {**before, "up.0.weight": before["up.0.weight"] + 1}
    assert_shards(model, changed, rank)
    load_full_state_dict(whole, path)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, changed[name]), name


def test_mapped_parameters_are_written_without_touching_the_file(tmp_path: Path) -> None:
    """Training must not write into the checkpoint, nor saving over it pull the memory from under the parameters."""
    save_full(Wide(), tmp_path)
    run_distributed(2, _mapped, str(tmp_path))
