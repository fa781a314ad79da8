"""Clusters as YAML: presets, files of the user, profiles measured on a machine.

The fields of a file carry their unit in their name; see clusters/h100x8.yaml for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any

from .hardware import Cluster, Device, FusedPoint, GemmPoint, Link

__all__ = [
    "Cluster",
    "Device",
    "FusedPoint",
    "GemmPoint",
    "Link",
    "preset_names",
    "read_cluster",
    "write_cluster",
]

_PRESETS = Path(__file__).parent / "clusters"
_DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4", "int8")


def preset_names() -> tuple[str, ...]:
    """Names of the presets `read_cluster` knows."""
    return tuple(sorted(path.stem for path in _PRESETS.glob("*.yaml")))


def read_cluster(source: Cluster | Mapping[str, Any] | str | PathLike[str]) -> Cluster:
    """A Cluster from a preset name ("h100x8"), a YAML file (as `plan --measure` writes) or the same as a dict.

    Raises ValueError in one line naming file, field, value and what is expected.
    """
    if isinstance(source, Cluster):
        return source
    if isinstance(source, Mapping):
        return cluster_of(source, "cluster")
    path = Path(source)
    if not path.suffix and not path.exists():
        path = _PRESETS / f"{source}.yaml"
        if not path.is_file():
            raise ValueError(
                f"cluster {str(source)!r} is not known; expected a YAML file or one of {', '.join(preset_names())}"
            )
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cluster file {path}: {error}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"cluster file {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, Mapping):
        raise ValueError(f"cluster file {path}: expected a mapping of fields, got {type(content).__name__}")
    return cluster_of(content, f"cluster file {path.name}")


def write_cluster(cluster: Cluster, path: str | PathLike[str]) -> None:
    """Writes the YAML file that `read_cluster` reads back, the same but for rounding of the units."""
    import yaml

    Path(path).write_text(yaml.safe_dump(mapping_of(cluster), sort_keys=False), encoding="utf-8")


class _Fields:
    """Takes the fields of one mapping of a file, checked; complains about those nobody took."""

    def __init__(self, content: Any, where: str) -> None:
        if not isinstance(content, Mapping):
            raise ValueError(f"{where}: expected a mapping of fields, got {content!r}")
        self._content = {str(name): value for name, value in content.items()}
        self._where = where
        self._taken: set[str] = set()

    def value(self, name: str, default: Any = ...) -> Any:
        self._taken.add(name)
        if name not in self._content:
            if default is ...:
                raise ValueError(f"{self._where}: {name} is missing")
            return default
        return self._content[name]

    def number(
        self, name: str, default: Any = ..., *, least: float = 0.0, most: float = float("inf")
    ) -> float:
        """A finite number above `least` (or equal to it where least is not 0), at most `most`."""
        value = self.value(name, default)
        try:
            number = float("nan") if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = float("nan")
        if not (least <= number <= most) or number == float("inf"):
            limits = f"a number from {least:g}" + (f" to {most:g}" if most < float("inf") else " up")
            raise ValueError(f"{self._where}: {name}={value!r}; expected {limits}")
        return number

    def above_zero(self, name: str, default: Any = ..., *, most: float = float("inf")) -> float:
        number = self.number(name, default, most=most)
        if number == 0:
            raise ValueError(f"{self._where}: {name}=0; expected a number above 0")
        return number

    def count(self, name: str, default: Any = ..., *, least: int = 1) -> int:
        value = self.value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{self._where}: {name}={value!r}; expected an integer >= {least}")
        return value

    def done(self) -> None:
        if unknown := sorted(set(self._content) - self._taken):
            raise ValueError(
                f"{self._where}: {unknown[0]} is not a field; expected {', '.join(sorted(self._taken))}"
            )


def cluster_of(content: Mapping[str, Any], where: str) -> Cluster:
    """The Cluster a mapping of a file describes, checked. ValueError names `where`, field, value, expectation."""
    fields = _Fields(content, where)
    per_node = fields.count("devices_per_node")
    fabric = fields.value("fabric", None)
    numa = fields.count("numa", 1)
    cluster = Cluster(
        name=str(fields.value("name")),
        device=_device(fields.value("device"), f"{where}: device"),
        devices_per_node=per_node,
        node=_link(fields.value("node"), f"{where}: node", per_node),
        fabric=None if fabric is None else _link(fabric, f"{where}: fabric", 0),
        oversubscription=fields.number("oversubscription", 1.0, least=1.0),
        numa=numa,
        source=str(fields.value("source", "")),
        measured={str(k): str(v) for k, v in dict(fields.value("measured", None) or {}).items()},
    )
    fields.done()
    if per_node % numa:
        raise ValueError(f"{where}: numa={numa} does not divide devices_per_node={per_node}")
    if cluster.fabric is not None and cluster.fabric.multicast:
        raise ValueError(f"{where}: fabric: multicast is a property of a node's switch; set it under node")
    return cluster


def _device(content: Any, where: str) -> Device:
    fields = _Fields(content, where)
    peaks = _Fields(fields.value("peak_tflops"), f"{where}: peak_tflops")
    peak = {name: peaks.above_zero(name) * 1e12 for name in _DTYPES if peaks.value(name, None) is not None}
    peaks.done()
    if not peak:
        raise ValueError(
            f"{where}: peak_tflops is empty; expected TFLOP/s of at least one of {', '.join(_DTYPES)}"
        )
    device = Device(
        name=str(fields.value("name")),
        memory=fields.above_zero("memory_gib") * 2**30,
        peak=peak,
        memory_bandwidth=fields.above_zero("memory_gb_per_s") * 1e9,
        efficiency=fields.above_zero("efficiency", 0.7, most=1.0),
        attention_efficiency=fields.above_zero("attention_efficiency", 0.5, most=1.0),
        memory_efficiency=fields.above_zero("memory_efficiency", 0.8, most=1.0),
        kernel_latency=fields.number("kernel_latency_us", 4.0) * 1e-6,
        slowdown=fields.number("slowdown", 0.1),
        reserved=fields.number("reserved_gib", 0.0) * 2**30,
        gemms=tuple(_gemm_point(row, f"{where}: gemms") for row in fields.value("gemms", None) or ()),
        fused=tuple(_fused_point(row, f"{where}: fused") for row in fields.value("fused", None) or ()),
    )
    fields.done()
    if device.reserved >= device.memory:
        raise ValueError(f"{where}: reserved_gib leaves nothing of memory_gib")
    return device


def _link(content: Any, where: str, ranks: int) -> Link:
    fields = _Fields(content, where)
    link = Link(
        name=str(fields.value("name")),
        bandwidth=fields.above_zero("gb_per_s") * 1e9,
        latency=fields.number("latency_us") * 1e-6,
        ranks=fields.count("ranks", ranks, least=0),
        multicast=bool(fields.value("multicast", False)),
        efficiency=fields.above_zero("efficiency", 0.8, most=1.0),
    )
    fields.done()
    return link


def _gemm_point(content: Any, where: str) -> GemmPoint:
    fields = _Fields(content, where)
    m, n, k = (fields.count(name) for name in "mnk")
    point = GemmPoint(m, n, k, fields.above_zero("efficiency", most=1.0), str(fields.value("dtype", "bf16")))
    fields.done()
    return point


def _fused_point(content: Any, where: str) -> FusedPoint:
    fields = _Fields(content, where)
    m, n, k, ranks = (fields.count(name) for name in ("m", "n", "k", "ranks"))
    seconds = fields.above_zero("us") * 1e-6
    point = FusedPoint(str(fields.value("op")), m, n, k, ranks, seconds, str(fields.value("dtype", "bf16")))
    fields.done()
    return point


def mapping_of(cluster: Cluster) -> dict[str, Any]:
    """The content of the file that describes this cluster."""
    device = cluster.device
    content: dict[str, Any] = {
        "name": cluster.name,
        "source": cluster.source,
        "measured": dict(cluster.measured),
        "devices_per_node": cluster.devices_per_node,
        "numa": cluster.numa,
        "device": {
            "name": device.name,
            "memory_gib": device.memory / 2**30,
            "memory_gb_per_s": device.memory_bandwidth / 1e9,
            "peak_tflops": {name: value / 1e12 for name, value in device.peak.items()},
            "efficiency": device.efficiency,
            "attention_efficiency": device.attention_efficiency,
            "memory_efficiency": device.memory_efficiency,
            "kernel_latency_us": device.kernel_latency * 1e6,
            "slowdown": device.slowdown,
            "reserved_gib": device.reserved / 2**30,
            "gemms": [asdict(point) for point in device.gemms],
            "fused": [_fused_mapping(point) for point in device.fused],
        },
        "node": _link_mapping(cluster.node),
    }
    if cluster.fabric is not None:
        content["fabric"] = _link_mapping(cluster.fabric)
        content["oversubscription"] = cluster.oversubscription
    return content


def _fused_mapping(point: FusedPoint) -> dict[str, Any]:
    row = asdict(point)
    row["us"] = row.pop("seconds") * 1e6
    return row


def _link_mapping(link: Link) -> dict[str, Any]:
    return {
        "name": link.name,
        "gb_per_s": link.bandwidth / 1e9,
        "latency_us": link.latency * 1e6,
        "ranks": link.ranks,
        "multicast": link.multicast,
        "efficiency": link.efficiency,
    }
