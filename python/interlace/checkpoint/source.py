"""Whole checkpoints read in slices: a state dict in memory, safetensors files, torch.save files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..modules.held import as_dtensor

__all__ = ["FullCheckpoint", "Source", "open_source"]

Source: TypeAlias = "Mapping[str, Any] | str | os.PathLike[str]"
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
FILES = ("model.safetensors", "pytorch_model.bin")


class FullCheckpoint:
    """Tensors of a whole model by name, of which only the slices asked for are read. A context manager.

    bytes_read: bytes of all slices so far.
    """

    def __init__(self) -> None:
        self.bytes_read = 0
        self._values: dict[str, Any] = {}  # tensors, safetensors' slices, extra state
        self._files = ExitStack()
        self._mapped: tuple[type, ...] = ()

    def __enter__(self) -> FullCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._values = {}
        self._files.close()

    def add_mapping(self, values: Mapping[str, Any]) -> None:
        """Tensors in memory."""
        self._values.update(values)

    def add_file(self, path: Path, names: set[str] | None = None) -> None:
        """Tensors of a file, mapped and not read yet; with `names` only these."""
        if path.suffix == ".safetensors":
            opened = self._files.enter_context(_safe_open(path))
            found: Mapping[str, Any] = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            self._mapped = tuple({type(value) for value in found.values()})
        else:
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        missing = (names or set()) - set(found)
        if missing:
            raise ValueError(f"{path} lacks {min(missing)}, which the index places there")
        self._values.update({name: found[name] for name in names or found})

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def names(self) -> list[str]:
        """Names of everything in the checkpoint."""
        return list(self._values)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a whole tensor; None for a value that is no tensor."""
        value = self._values[name]
        if isinstance(value, Tensor):
            return tuple(value.shape)
        return tuple(value.get_shape()) if hasattr(value, "get_shape") else None

    def is_mapped(self, name: str) -> bool:
        """True when the tensor lies in a safetensors file as it is."""
        return isinstance(self._values[name], self._mapped)

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor."""
        value = self._values[name]
        if isinstance(value, Tensor):
            return value.dtype
        nothing: Tensor = value[(slice(0, 0),) * len(value.get_shape())]
        return nothing.dtype

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """The slice of a tensor, on the CPU or where the state dict has it; () for a tensor of no dims."""
        value = self._values[name]
        part: Tensor = value[slices]
        self.bytes_read += part.numel() * part.element_size()
        return part

    def value(self, name: str) -> Any:
        """A value as it is: a tensor, something with get_shape() that is read by slices, or what is no tensor."""
        return self._values[name]

    def replace(self, names: Iterable[str], values: Mapping[str, Any]) -> None:
        """Put `values` in the place of what has these names."""
        for name in names:
            del self._values[name]
        self._values.update(values)


def open_source(op: str, source: Source, checkpoint: FullCheckpoint) -> None:
    """Add a mapping of names to whole tensors, a safetensors or torch.save file, an index, or a folder with one.

    ValueError or FileNotFoundError when it is none of them.
    """
    if isinstance(source, Mapping):
        for name, value in source.items():
            if as_dtensor(value) is not None:
                raise ValueError(f"{op}: {name} is a DTensor; expected whole tensors (value.full_tensor())")
        checkpoint.add_mapping(source)
        return
    path = Path(source).expanduser()
    if path.is_dir():
        known = [path / name for name in (*INDEXES, *FILES) if (path / name).is_file()]
        if not known:
            raise FileNotFoundError(f"{op}: {path} has none of {', '.join((*INDEXES, *FILES))}")
        path = known[0]
    if not path.is_file():
        raise FileNotFoundError(f"{op}: there is no file or folder {path}")
    if path.suffix != ".json":
        checkpoint.add_file(path)
        return
    files: dict[str, set[str]] = {}
    for name, file in json.loads(path.read_text(encoding="utf-8"))["weight_map"].items():
        files.setdefault(file, set()).add(name)
    for file, names in files.items():
        checkpoint.add_file(path.parent / file, names)


def _safe_open(path: Path) -> Any:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError(
            f"reading {path} needs the package safetensors (pip install safetensors)"
        ) from error
    return safe_open(str(path), framework="pt", device="cpu")
