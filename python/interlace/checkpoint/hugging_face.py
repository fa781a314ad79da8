"""Checkpoints with other names or tensors than the model: what transformers renames and puts together on loading.

From version 5 on, transformers keeps many models in another form than the files on the hub: experts stacked in one
tensor, modules renamed. Its own table says how; here it is applied to slices.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from .entries import Entry
from .source import FullCheckpoint

__all__ = ["convert_names"]

_STACKED = (["MergeModulelist"], ["MergeModulelist", "Concatenate"])


def convert_names(model: nn.Module, entries: Iterable[Entry], checkpoint: FullCheckpoint) -> None:
    """Give the checkpoint the names of `model`, where transformers knows how; values that have them stay.

    ValueError when transformers has a conversion that cannot be done tensor by tensor.
    """
    transforms = _transforms(model)
    if not transforms:
        return
    shapes = {entry.name: entry.whole_shape for entry in entries if isinstance(entry.value, Tensor)}
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    ours = {*shapes, *(prefix + name for name in shapes), *(name.removeprefix(prefix) for name in shapes)}
    converters = [transform for transform in transforms if hasattr(transform, "operations")]
    renamings = [transform for transform in transforms if not hasattr(transform, "operations")]
    groups: dict[str, _Group] = {}
    for key in sorted(checkpoint.names(), key=_natural):
        if key in ours:
            continue
        name = key
        for renaming in renamings:
            name = renaming.rename_source_key(name)[0]
        for converter in converters:
            name, pattern = converter.rename_source_key(name)
            if pattern is not None:
                groups.setdefault(name, _Group(converter, {})).sources.setdefault(pattern, []).append(key)
                break
        else:
            if name != key:
                checkpoint.replace([key], {name: checkpoint.value(key)})
    whole = _WholeModel(shapes, getattr(model, "config", None), prefix)
    for name, group in groups.items():
        keys = [key for found in group.sources.values() for key in found]
        checkpoint.replace(keys, _converted(name, group, whole, checkpoint))


def _transforms(model: nn.Module) -> list[Any]:
    """transformers' table for the model; [] when the model is none of its, or it is older than the table."""
    models = sys.modules.get("transformers.modeling_utils")
    if models is None or not isinstance(model, models.PreTrainedModel):
        return []
    mapping = sys.modules.get("transformers.conversion_mapping")
    find = getattr(mapping, "get_model_conversion_mapping", None)
    return list(find(model)) if find is not None else []


def _natural(key: str) -> list[tuple[int, Any]]:
    """Order in which numbers between dots count as numbers, so that expert 10 comes behind expert 9."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"\.", key)]


class _Group(SimpleNamespace):
    """A converter and what it puts together: keys of the checkpoint by the pattern that they matched."""

    converter: Any
    sources: dict[str, list[str]]

    def __init__(self, converter: Any, sources: dict[str, list[str]]) -> None:
        super().__init__(converter=converter, sources=sources)


class _WholeModel:
    """What conversions ask of a model: sizes of the unsplit parameters."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], config: Any, prefix: str) -> None:
        self.shapes, self.config, self.prefix = shapes, config, prefix

    def get_parameter(self, name: str) -> Tensor:
        """A tensor without memory of the size of the whole."""
        known = self.shapes.get(name, self.shapes.get(self.prefix + name))
        if known is None:
            known = self.shapes[name.removeprefix(self.prefix)]
        return torch.empty(known, device="meta")


def _converted(name: str, group: _Group, whole: _WholeModel, checkpoint: FullCheckpoint) -> dict[str, Any]:
    """Values that are put together when they are read."""
    converter, sources = group.converter, group.sources
    parts = {
        pattern: [checkpoint.value(key) for key in keys]
        for pattern, keys in sorted(
            sources.items(), key=lambda item: converter.source_patterns.index(item[0])
        )
    }
    names = [type(operation).__name__ for operation in converter.operations]
    dims = [getattr(operation, "dim", None) for operation in converter.operations]
    if names in _STACKED and dims == [0, 1][: len(dims)] and len(converter.target_patterns) == 1:
        return {name: _Stacked(list(parts.values()))}
    on_meta = {
        pattern: [torch.empty(_shape(part), device="meta") for part in found]
        for pattern, found in parts.items()
    }
    targets = _run(name, converter, on_meta, whole)
    return {
        target: _Computed(target, tuple(value.shape), name, converter, parts, whole)
        for target, value in targets.items()
    }


def _run(name: str, converter: Any, parts: dict[str, list[Tensor]], whole: _WholeModel) -> dict[str, Tensor]:
    """Run transformers' operations on whole tensors."""
    mine = copy.deepcopy(converter)
    for pattern, tensors in parts.items():
        for place, tensor in enumerate(tensors):
            mine.add_tensor(name, f"{pattern}.{place}", pattern, lambda tensor=tensor: tensor)
    try:
        found: dict[str, Any] = mine.convert(name, model=whole, config=whole.config)
    except Exception as error:
        raise ValueError(
            f"load_full_state_dict: transformers' conversion of {name} cannot be done for a split model ({error}); "
            "load with from_pretrained and save the model once, then load those files"
        ) from error
    return {key: value[0] if isinstance(value, list) else value for key, value in found.items()}


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape if isinstance(value, Tensor) else value.get_shape())


class _Stacked:
    """[E, sum of rows, ..] out of E tensors [rows, ..] of each kind (gate, up); reads the slices it is asked for."""

    def __init__(self, kinds: Sequence[Sequence[Any]]) -> None:
        self.kinds = kinds
        self.rows = [_shape(kind[0])[0] for kind in kinds]
        for kind in kinds:
            if len(kind) != len(kinds[0]) or any(_shape(part) != _shape(kind[0]) for part in kind):
                raise ValueError(
                    "load_full_state_dict: experts of different number or size cannot be stacked"
                )

    def get_shape(self) -> list[int]:
        """As safetensors' slices have it."""
        return [len(self.kinds[0]), sum(self.rows), *_shape(self.kinds[0][0])[1:]]

    def __getitem__(self, slices: tuple[slice, ...]) -> Tensor:
        experts, wanted, rest = slices[0], slices[1], slices[2:]
        low, high, _ = wanted.indices(sum(self.rows))
        out: Tensor | None = None
        numbers = range(*experts.indices(len(self.kinds[0])))
        for place, expert in enumerate(numbers):
            start = filled = 0
            for kind, rows in zip(self.kinds, self.rows, strict=True):
                first, last = max(low - start, 0), min(high - start, rows)
                start += rows
                if first >= last:
                    continue
                index = (slice(first, last), *rest)
                part = kind[expert][index]
                if out is None:
                    out = part.new_empty((len(numbers), high - low, *part.shape[1:]))
                out[place, filled : filled + last - first] = part
                filled += last - first
        return torch.empty(0) if out is None else out


class _Computed:
    """What transformers' operations make of whole tensors; computed anew at every read."""

    def __init__(
        self,
        target: str,
        shape: tuple[int, ...],
        name: str,
        converter: Any,
        parts: dict[str, list[Any]],
        whole: _WholeModel,
    ) -> None:
        self.target, self.shape, self.name = target, shape, name
        self.converter, self.parts, self.whole = converter, parts, whole

    def get_shape(self) -> list[int]:
        """As safetensors' slices have it."""
        return list(self.shape)

    def __getitem__(self, slices: tuple[slice, ...]) -> Tensor:
        read = {
            pattern: [part[(slice(None),) * len(_shape(part))] for part in found]
            for pattern, found in self.parts.items()
        }
        return _run(self.name, self.converter, read, self.whole)[self.target][slices]
