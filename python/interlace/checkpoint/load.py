"""A whole checkpoint into a split model: every rank reads its own slices."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from ..modules.held import as_dtensor, local_part
from .entries import Entry, agree, entries_of, tensors_by_place
from .hugging_face import convert_names
from .meta import allocated, like, materialise_buffers
from .source import FullCheckpoint, Source, open_source

__all__ = ["load_full_state_dict"]

OP = "load_full_state_dict"


def load_full_state_dict(
    model: nn.Module, source: Source, *, strict: bool = True, device: torch.device | str = "cpu"
) -> _IncompatibleKeys:
    """Load a checkpoint of the unsplit model into a split one; returns the missing and unexpected keys, as torch does.

    source: a state dict of whole tensors, or a path: a safetensors or torch.save file, an index.json of several, or
    the folder of a Hugging Face model. Of files a rank reads its slices only, and holds its shard and one tensor
    more. Values are converted to the dtype of the parameters.

    A model that was built and split on the meta device gets its memory here, on `device`: parameters, buffers of the
    checkpoint, and buffers that no checkpoint has, which Hugging Face models compute themselves. On the CPU a part
    that lies in one piece and in the parameter's dtype in a safetensors file stays mapped, as from_pretrained has it:
    pages are read when used, and copied when written. Ties stay: a tied parameter is read once, under any name.

    Raises RuntimeError in torch's words for a wrong shape and, with strict, for missing or unexpected keys; ValueError
    for buffers that cannot be computed; on every rank of the groups, with the model unchanged. Collective.
    """
    entries = entries_of(model)
    layouts = [entry.layout for entry in entries]
    with FullCheckpoint() as checkpoint, torch.no_grad():
        plan: _Plan | None = None
        problem: Exception | None = None
        try:
            open_source(OP, source, checkpoint)
            convert_names(model, entries, checkpoint)
            plan = _Plan(model, entries, checkpoint)
            plan.check(strict)
            _check_fsdp(model, entries)
            materialise_buffers(OP, model, torch.device(device))
        except Exception as error:  # whatever it is, the peers wait in agree() and must hear of it
            problem = error
        agree(OP, layouts, problem)
        assert plan is not None
        try:
            _copy(model, plan, torch.device(device))
        except Exception as error:
            problem = error
        agree(OP, layouts, problem)
    return _IncompatibleKeys(plan.missing, plan.unexpected)


class _Plan:
    """Which entry is read under which name of the checkpoint."""

    def __init__(self, model: nn.Module, entries: list[Entry], checkpoint: FullCheckpoint) -> None:
        self.title, self.checkpoint = type(model).__name__, checkpoint
        prefix = f"{getattr(model, 'base_model_prefix', '') or ''}."
        # by tensor: a tied one may be saved under one of its names only, and is read once
        self.reads: dict[int | str, tuple[Entry, str]] = {}
        used: set[str] = set()
        for entry in entries:
            key = _find(entry.name, prefix, checkpoint)
            if key is not None:
                used.add(key)
                self.reads.setdefault(_identity(entry), (entry, key))
        missing = [entry.name for entry in entries if _identity(entry) not in self.reads]
        unexpected = [name for name in checkpoint.names() if name not in used]
        self.missing = _without(missing, getattr(model, "_keys_to_ignore_on_load_missing", None))
        self.unexpected = _without(unexpected, getattr(model, "_keys_to_ignore_on_load_unexpected", None))

    def check(self, strict: bool) -> None:
        """RuntimeError as torch.nn.Module.load_state_dict raises it."""
        wrong: list[str] = []
        if strict and self.unexpected:
            wrong.append(f"Unexpected key(s) in state_dict: {_quoted(self.unexpected)}. ")
        if strict and self.missing:
            wrong.append(f"Missing key(s) in state_dict: {_quoted(self.missing)}. ")
        for entry, key in self.reads.values():
            found = self.checkpoint.shape(key)
            if isinstance(entry.value, Tensor) and found != entry.whole_shape:
                wrong.append(
                    f"size mismatch for {entry.name}: copying a param with shape {found} from checkpoint, "
                    f"the shape in the unsplit model is {entry.whole_shape}."
                )
        if wrong:
            raise RuntimeError(f"Error(s) in loading state_dict for {self.title}:\n\t" + "\n\t".join(wrong))


def _identity(entry: Entry) -> int | str:
    return id(entry.value) if isinstance(entry.value, Tensor) else entry.name


def _find(name: str, prefix: str, checkpoint: FullCheckpoint) -> str | None:
    """The name in the checkpoint: that of a base model lacks the prefix, that of a model with a head has it."""
    if name in checkpoint:
        return name
    if prefix != ".":
        other = name.removeprefix(prefix) if name.startswith(prefix) else prefix + name
        if other in checkpoint:
            return other
    return None


def _without(names: Iterable[str], patterns: Any) -> list[str]:
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns or ())]


def _quoted(names: list[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _check_fsdp(model: nn.Module, entries: list[Entry]) -> None:
    on_meta = [e.name for e in entries if isinstance(e.value, Tensor) and e.value.is_meta]
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if on_meta and fsdp is not None and any(isinstance(m, fsdp.FSDPModule) for m in model.modules()):
        raise ValueError(
            f"{OP}: {on_meta[0]} of a model under fully_shard is on the meta device; call "
            "model.to_empty(device=...) before loading"
        )


def _copy(model: nn.Module, plan: _Plan, device: torch.device) -> None:
    places = tensors_by_place(model)
    modules = dict(model.named_modules())
    here = dict(model.named_parameters(remove_duplicate=False))
    for entry, key in plan.reads.values():
        value = entry.value
        if not isinstance(value, Tensor):
            modules[entry.key.rpartition(".")[0]].set_extra_state(plan.checkpoint.value(key))
            continue
        value = here.get(entry.key, value)  # the state dict has a plain copy of a packed weight
        if not value.is_meta:
            _fill(value, entry, plan.checkpoint, key)
            continue
        fresh = _mapped(value, entry, plan.checkpoint, key, device)
        if fresh is None:
            fresh = allocated(value, device)
            _fill(fresh, entry, plan.checkpoint, key)
        for held, name in places.get(id(entry.value), []):
            held[name] = fresh


def _mapped(
    value: Tensor, entry: Entry, checkpoint: FullCheckpoint, key: str, device: torch.device
) -> Tensor | None:
    """A meta tensor's part of a mapped file as it lies there, without a copy; None when it is not in one piece."""
    boxes = entry.boxes(value)
    if (
        as_dtensor(value) is not None
        or device.type != "cpu"
        or len(boxes) != 1
        or not checkpoint.is_mapped(key)
    ):
        return None
    if boxes[0].size[1:] != entry.whole_shape[1:] or checkpoint.dtype(key) != value.dtype:
        return None
    part = checkpoint.read(key, boxes[0].slices)
    size, start = part.numel() * part.element_size(), part.storage_offset() * part.element_size()
    # a storage of its own: torch.save and deepcopy take whole storages
    storage = part.untyped_storage()[start : start + size]
    own = torch.empty(0, dtype=part.dtype).set_(storage, 0, part.shape, part.stride())
    return like(value, own)


def _fill(value: Tensor, entry: Entry, checkpoint: FullCheckpoint, key: str) -> None:
    split = as_dtensor(value)
    if split is not None and entry.layout is None and not _is_box(split):
        from torch.distributed.tensor import distribute_tensor

        whole = checkpoint.read(key, (slice(None),) * value.dim()).to(value.device)
        part: Any = distribute_tensor(whole, split.device_mesh, split.placements, src_data_rank=None)
        local_part(value).copy_(part.to_local())
        return
    local = local_part(value)
    # a subclass (a packed weight) is written as a whole: views of it are copies
    target = local if type(local) in (Tensor, nn.Parameter) else torch.empty(local.shape, dtype=local.dtype)
    for box in entry.boxes(value):
        box.of_local(target).copy_(checkpoint.read(key, box.slices))
    if target is not local:
        local.copy_(target)


def _is_box(value: Any) -> bool:
    """True when every rank holds one box of the tensor: no placement but replicas and contiguous shards of torch."""
    return all(type(p).__name__ in ("Shard", "Replicate") for p in value.placements)
