"""A split model back into the files of a Hugging Face checkpoint, one whole tensor after the other."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from .entries import Entry, agree, entries_of
from .gather import is_rank0, whole_tensor

__all__ = ["save_full"]

OP = "save_full"
SINGLE = "model.safetensors"
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def save_full(model: nn.Module, path: str | os.PathLike[str], *, max_shard_size: int | str = "5GB") -> None:
    """Write the unsplit model to the folder `path` as safetensors, which `from_pretrained` and `load_full_state_dict`
    read.

    One file model.safetensors, or several of at most max_shard_size bytes ("500MB"; a larger tensor has a file of its
    own) with model.safetensors.index.json; config.json and generation_config.json of a Hugging Face model too. Rank 0
    writes and holds one file's tensors, the others a shard. Tied tensors are written once. Raises on every rank when
    rank 0 cannot write. Collective: every rank of the model calls it.
    """
    limit = _bytes_of(max_shard_size)
    unique: dict[int, Entry] = {}
    for entry in entries_of(model):
        if isinstance(entry.value, Tensor):
            unique.setdefault(id(entry.value), entry)
    files = _files(list(unique.values()), limit)
    layouts = [entry.layout for entry in unique.values()]
    writes = is_rank0()
    folder = Path(path).expanduser()
    problem: Exception | None = None
    for name, entries in files.items():
        tensors: dict[str, Tensor] = {}
        for entry in entries:
            whole = whole_tensor(entry.value, entry.layout, rank0_only=True)
            if whole is not None:
                tensors[entry.name] = whole.cpu().contiguous()
        if writes and problem is None:
            try:
                _write(folder / name, tensors)
            except Exception as error:
                problem = error  # the peers go on gathering: they hear of it below
    if writes and problem is None:
        try:
            _write_index(folder, files)
            _write_config(model, folder)
        except Exception as error:
            problem = error
    agree(OP, layouts, problem)


def _bytes_of(size: int | str) -> int:
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(KB|MB|GB|TB)\s*", str(size).upper())
    if not match or isinstance(size, int):
        raise ValueError(f'{OP}: max_shard_size={size!r}; expected bytes > 0 or a text such as "5GB"')
    return int(float(match[1]) * UNITS[match[2]])


def _size_of(entry: Entry) -> int:
    size: int = entry.value.element_size()
    for length in entry.whole_shape:
        size *= length
    return size


def _files(entries: list[Entry], limit: int) -> dict[str, list[Entry]]:
    """Name of each file -> what goes into it, in the order of the state dict."""
    groups: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        size = _size_of(entry)
        if groups[-1] and filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(entry)
        filled += size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": group
        for number, group in enumerate(groups, 1)
    }


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError(
            f"writing {path} needs the package safetensors (pip install safetensors)"
        ) from error
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    save_file(tensors, unfinished, metadata={"format": "pt"})
    unfinished.replace(path)  # parameters may be mapped from a file of this name, which must stay as it is


def _write_index(folder: Path, files: dict[str, list[Entry]]) -> None:
    """The index of several files; what an earlier checkpoint left in the folder would be read instead, so it goes."""
    index = folder / f"{SINGLE}.index.json"
    for old in folder.glob("model*.safetensors"):
        if old.name not in files and re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors", old.name):
            old.unlink()
    if len(files) == 1:
        index.unlink(missing_ok=True)
        return
    total = sum(_size_of(entry) for entries in files.values() for entry in entries)
    weight_map = {entry.name: name for name, entries in files.items() for entry in entries}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
    index.write_text(text + "\n", encoding="utf-8")


def _write_config(model: nn.Module, folder: Path) -> None:
    for part in ("config", "generation_config"):
        settings: Any = getattr(model, part, None)
        if hasattr(settings, "save_pretrained"):
            settings.save_pretrained(folder)
