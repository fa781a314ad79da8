"""One line of every benchmark, and a run's report of lines: one schema for all subcommands, to JSON and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

__all__ = ["SCHEMA", "Report", "Row", "read_report"]

SCHEMA = 2  # 1 was one shape of JSON per script


@dataclass(frozen=True)
class Row:
    """One op at one size. Times are microseconds, medians, of the slowest rank; None is "not measured" or "has none".

    Which one it is: op to straggler_us (`key`). baseline, peer: names of what the next figures belong to. speedup =
    baseline_p20_us / p20_us, peer_speedup likewise. exposed_us = fused - compute, overlap_efficiency = 1 -
    exposed / collective, engine_ratio = compute / the library's product, communication_ratio = fused / compute,
    x_floor = fused / the least it could take. tflops: of one rank. algbw_gbps, busbw_gbps: as nccl-tests. extra:
    whatever one benchmark has beyond.
    """

    op: str
    case: str = ""
    m: int | None = None
    n: int | None = None
    k: int | None = None
    tokens: int | None = None
    heads: int | None = None
    bytes: int | None = None
    world_size: int = 1
    dtype: str = "float32"
    cache: str = "hot"
    straggler_us: float | None = None
    algorithm: str | None = None
    reason: str | None = None
    baseline: str | None = None
    baseline_us: float | None = None
    baseline_p20_us: float | None = None
    peer: str | None = None
    peer_us: float | None = None
    peer_speedup: float | None = None
    peers_us: Mapping[str, float] = field(default_factory=dict)
    fused_us: float | None = None
    p20_us: float | None = None
    p95_us: float | None = None
    compute_us: float | None = None
    collective_us: float | None = None
    floor_us: float | None = None
    exposed_us: float | None = None
    overlap_efficiency: float | None = None
    engine_ratio: float | None = None
    communication_ratio: float | None = None
    speedup: float | None = None
    x_floor: float | None = None
    tflops: float | None = None
    algbw_gbps: float | None = None
    busbw_gbps: float | None = None
    correct: bool = True
    wrong: int = 0
    kept: int | None = None
    taken: int | None = None
    oversubscribed: bool = False
    skipped: str | None = None
    note: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[object, ...]:
        """What it is a measurement of: equal for the same line of two runs."""
        return (
            self.op, self.case, self.m, self.n, self.k, self.tokens, self.heads, self.bytes, self.world_size,
            self.dtype, self.cache, self.straggler_us, self.extra.get("kv_heads"),
        )  # fmt: skip

    @property
    def name(self) -> str:
        """The key for a person."""
        sizes = [
            f"{label}={value}" for label, value in zip("MNK", (self.m, self.n, self.k), strict=True) if value
        ]
        sizes += [f"{label}={v:,}" for label, v in (("tokens", self.tokens), ("bytes", self.bytes)) if v]
        tail = [f"{self.world_size} ranks", self.cache]
        tail += [f"straggler {self.straggler_us:g} us"] if self.straggler_us else []
        return " ".join([*filter(None, (self.op, self.case)), *sizes, self.dtype, *tail])

    def value(self, key: str) -> Any:
        """A field, or what `extra` has under that name; None where neither has it."""
        return getattr(self, key) if key in _FIELDS else self.extra.get(key)

    def with_extra(self, **more: object) -> Row:
        """The same line with more in `extra`."""
        return replace(self, extra={**self.extra, **more})


_FIELDS = frozenset(f.name for f in fields(Row))


@dataclass
class Report:
    """What a subcommand leaves: its rows and all they depend on. `partial`: it was interrupted.

    timeline: {"case", "spans"} of one case, see `bench.trace`; its file is its own,
    not the JSON of results.
    """

    benchmark: str
    command: str = ""
    commit: str | None = None
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    peers: list[dict[str, Any]] = field(default_factory=list)
    harness: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    partial: bool = False
    timeline: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def head(self) -> dict[str, Any]:
        """All but the rows, JSON types only."""
        return {"schema": SCHEMA, **{f.name: getattr(self, f.name) for f in fields(self) if f.name != "rows"}}

    def to_json(self) -> str:
        """The text of a result file; NaN and infinity, which JSON has not, are refused with ValueError."""
        content = {name: value for name, value in self.head().items() if name != "timeline"}
        head = json.dumps(content, indent=1, allow_nan=False).removesuffix("\n}")
        rows = ",\n  ".join(json.dumps(rounded(asdict(row)), allow_nan=False) for row in self.rows)
        return f'{head},\n "rows": [\n  {rows}\n ]\n}}\n'

    @classmethod
    def of(cls, head: Mapping[str, Any], rows: Iterable[Mapping[str, Any]], origin: str) -> Report:
        """From what `head` and `asdict` of rows gave. ValueError for another schema, naming `origin`."""
        if head.get("schema") != SCHEMA:
            raise ValueError(
                f"{origin}: schema {head.get('schema')}, expected {SCHEMA}; write it again with this version's "
                "`interlace bench ... --json`"
            )
        known = {f.name for f in fields(cls)} - {"rows"}
        found = cls(**{name: value for name, value in head.items() if name in known})
        found.rows = [Row(**{n: v for n, v in row.items() if n in _FIELDS}) for row in rows]
        return found


def rounded(value: Any) -> Any:
    """Floats to six digits, as far as any clock goes; containers likewise."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {name: rounded(part) for name, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, (list, tuple)) else value


def read_report(path: str | Path) -> Report:
    """A result file. ValueError when it is none, or of another schema; OSError when it cannot be read."""
    try:
        content = json.loads(Path(path).read_text())
        rows = content.pop("rows")
    except (json.JSONDecodeError, AttributeError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: not a result of `interlace bench ... --json` ({error})") from None
    return Report.of(content, rows, str(path))
