"""Tables of measured choices: JSON, keyed by GPU, world size, dtype, op and shape bucket.

A file holds `schema`, `crossovers` by GPU name ("*" for every other) and `entries`. The package ships one; a user's
(INTERLACE_TUNED) is laid over it, its entries and crossovers win.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..config import settings
from ..hardware import Hardware
from .problem import ALGORITHMS, OPS, Launch, Problem

__all__ = ["SCHEMA", "Crossovers", "Entry", "Table", "bucket_of", "load", "merged", "parse", "read", "write"]

SCHEMA = 1
DEFAULTS = Path(__file__).parent / "tuned.json"
DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn")

Key = tuple[str, int, str, str, int, int]


@dataclass(frozen=True)
class Crossovers:
    """Where one algorithm overtakes another, for calls that were not measured. Rows of x, bytes of the message.

    overlap_rows_per_rank, overlap_elements_per_rank: gathers and scatters overlap from rows / world_size and
    rows x width / world_size on. all_reduce_rows_multicast, .._peer_stores: gemm_all_reduce is fused from these rows
    on. one_shot_bytes, two_shot_bytes: up to these sizes the all-reduce kernels are taken.

    The shipped ones are first guesses from what others published for H100 and H200: overlap pays from about 1e11 FLOP
    a rank (6e6 elements x ranks, at a model width of 8192 cut over them) and 1024 rows over 8 ranks; a fused
    all-reduce from 256 rows with multicast, 512 without; one shot up to 256 KiB; ours against NCCL up to 48 MiB.
    """

    overlap_rows_per_rank: int
    overlap_elements_per_rank: int
    all_reduce_rows_multicast: int
    all_reduce_rows_peer_stores: int
    one_shot_bytes: int
    two_shot_bytes: int


@dataclass(frozen=True)
class Entry:
    """The fastest algorithm of one bucket. origin: who measured it, when, with which versions."""

    gpu: str
    world_size: int
    dtype: str
    op: str
    rows: int
    width: int
    algorithm: str
    launch: Launch | None = None
    microseconds: Mapping[str, float] = field(default_factory=dict, hash=False)
    origin: str = "measured"

    @property
    def key(self) -> Key:
        """What a call is looked up by."""
        return self.gpu, self.world_size, self.dtype, self.op, self.rows, self.width


@dataclass(frozen=True)
class Table:
    """Crossovers by GPU and entries by bucket."""

    crossovers: Mapping[str, Crossovers]
    entries: Mapping[Key, Entry] = field(default_factory=dict)

    def find(self, problem: Problem, hardware: Hardware) -> Entry | None:
        """The entry of the bucket that the call is in, None when nobody measured it."""
        rows, width = bucket_of(problem.rows), bucket_of(problem.width)
        op = problem.op.removeprefix("sum_")
        return self.entries.get((hardware.name, problem.world_size, problem.dtype, op, rows, width))

    def crossovers_of(self, hardware: Hardware) -> Crossovers:
        """Those of the GPU, or the ones for every other."""
        return self.crossovers.get(hardware.name, self.crossovers["*"])

    def to_json(self) -> str:
        """The text of a file; equal tables give equal texts."""
        ordered = [_entry_json(self.entries[key]) for key in sorted(self.entries)]
        crossovers = {name: asdict(self.crossovers[name]) for name in sorted(self.crossovers)}
        return json.dumps({"schema": SCHEMA, "crossovers": crossovers, "entries": ordered}, indent=1) + "\n"

    @property
    def digest(self) -> str:
        """Equal on two ranks exactly when their tables are."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def bucket_of(size: int) -> int:
    """The power of two that a size is rounded up to."""
    return 1 << max(0, size - 1).bit_length()


def _entry_json(entry: Entry) -> dict[str, Any]:
    data = asdict(entry)
    if data["launch"] is None:
        del data["launch"]
    return data


def merged(base: Table, over: Table) -> Table:
    """`over` laid over `base`."""
    return Table({**base.crossovers, **over.crossovers}, {**base.entries, **over.entries})


def load() -> Table:
    """The shipped table with the one that INTERLACE_TUNED names laid over it. ValueError says what is wrong with it."""
    shipped = read(DEFAULTS)
    return merged(shipped, read(Path(settings.tuned))) if settings.tuned else shipped


def read(path: Path) -> Table:
    """Parse a file. ValueError names the file, the entry and what is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"tuned table {path}: {error.strerror}; unset INTERLACE_TUNED or name a file"
        ) from None
    return parse(text, str(path))


def parse(text: str, name: str) -> Table:
    """As read, from text; `name` is for errors."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"tuned table {name}: not JSON ({error}); write it with `interlace tune`") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise ValueError(
            f"tuned table {name}: schema {found!r}, expected {SCHEMA}; write it again with `interlace tune`"
        )
    entries = {}
    for place, item in enumerate(data.get("entries", [])):
        entry = _entry(item, f"tuned table {name}, entry {place}")
        entries[entry.key] = entry
    crossovers = {
        gpu: _built(Crossovers, item, f"tuned table {name}, crossovers of {gpu}")
        for gpu, item in data.get("crossovers", {}).items()
    }
    return Table(crossovers, entries)


def _built(kind: type, item: Any, where: str) -> Any:
    """A dataclass of whole numbers from JSON."""
    names = {f.name for f in fields(kind)}
    if not isinstance(item, dict) or set(item) != names:
        found = sorted(item) if isinstance(item, dict) else type(item).__name__
        raise ValueError(f"{where}: has {found}, expected {sorted(names)}")
    for name, value in item.items():
        if not isinstance(value, int) or value < 0:
            raise ValueError(f"{where}: {name}={value!r}; expected a whole number >= 0")
    return kind(**item)


def _entry(item: Any, where: str) -> Entry:
    if not isinstance(item, dict):
        raise ValueError(f"{where}: expected an object, got {type(item).__name__}")
    item = dict(item)
    unknown = set(item) - {f.name for f in fields(Entry)}
    missing = {"gpu", "world_size", "dtype", "op", "rows", "width", "algorithm"} - set(item)
    if unknown or missing:
        raise ValueError(f"{where}: unknown {sorted(unknown)}, missing {sorted(missing)}")
    for name, allowed in (("algorithm", ALGORITHMS), ("op", OPS), ("dtype", DTYPES)):
        if item[name] not in allowed:
            raise ValueError(f"{where}: {name}={item[name]!r}; expected one of {', '.join(allowed)}")
    for name in ("world_size", "rows", "width"):
        if not isinstance(item[name], int) or item[name] < 1:
            raise ValueError(f"{where}: {name}={item[name]!r}; expected a whole number >= 1")
    for name in ("rows", "width"):
        if bucket_of(item[name]) != item[name]:
            raise ValueError(f"{where}: {name}={item[name]}; buckets are powers of two")
    launch = item.pop("launch", None)
    return Entry(**item, launch=None if launch is None else _built(Launch, launch, f"{where}: launch"))


def write(path: Path, table: Table) -> None:
    """Write a file that `read` takes."""
    path.write_text(table.to_json(), encoding="utf-8")
