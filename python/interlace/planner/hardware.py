"""Devices, links and clusters: what a layout runs on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

__all__ = ["Cluster", "Device", "FusedPoint", "GemmPoint", "Link"]


@dataclass(frozen=True)
class GemmPoint:
    """Measured share of the peak of a product [m, k] x [k, n], 0 < efficiency <= 1."""

    m: int
    n: int
    k: int
    efficiency: float
    dtype: str = "bf16"


@dataclass(frozen=True)
class FusedPoint:
    """Measured time of a fused op: seconds for [m, k] x [k, n] (unsharded sizes) over `ranks` ranks."""

    op: str
    m: int
    n: int
    k: int
    ranks: int
    seconds: float
    dtype: str = "bf16"


@dataclass(frozen=True)
class Device:
    """One accelerator (or one process of a CPU machine).

    memory: bytes. peak: FLOP/s by dtype ("fp32", "bf16", "fp16", "fp8"). memory_bandwidth: bytes/s.
    efficiency: share of the peak that large products reach. memory_efficiency: share of memory_bandwidth that
    elementwise kernels reach. kernel_latency: seconds each kernel costs at least. slowdown: how much a product slows
    while a collective runs beside it (0.1 = 10 %). gemms, fused: measured tables, empty when nothing was measured.
    """

    name: str
    memory: float
    peak: Mapping[str, float] = field(hash=False)
    memory_bandwidth: float
    efficiency: float = 0.7
    attention_efficiency: float = 0.6
    memory_efficiency: float = 0.8
    kernel_latency: float = 4e-6
    slowdown: float = 0.1
    reserved: float = 0.0
    gemms: tuple[GemmPoint, ...] = field(default=(), hash=False)
    fused: tuple[FusedPoint, ...] = field(default=(), hash=False)


@dataclass(frozen=True)
class Link:
    """What connects the ranks of a domain.

    bandwidth: bytes/s a rank can send (one direction) while it receives as much. latency: seconds of one hop of one
    message. ranks: how many ranks the domain holds (0 = no limit). multicast: the switch reduces and multiplies
    messages (NVLink SHARP), so algorithm "multimem" exists. efficiency: share of bandwidth large messages reach.
    """

    name: str
    bandwidth: float
    latency: float
    ranks: int = 0
    multicast: bool = False
    efficiency: float = 0.8

    @property
    def rate(self) -> float:
        """Bytes/s that large messages reach: bandwidth x efficiency."""
        return self.bandwidth * self.efficiency


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal devices. node: the link inside a node; fabric: between nodes (None: one node only).

    oversubscription: how much more traffic leaves the nodes than the fabric's core carries, 1 = full bisection.
    numa: NUMA domains per node.
    """

    name: str
    device: Device
    devices_per_node: int
    node: Link
    fabric: Link | None = None
    oversubscription: float = 1.0
    numa: int = 1
    source: str = ""
    measured: Mapping[str, str] = field(default_factory=dict, hash=False)

    def link(self, ranks: int, stride: int = 1) -> Link:
        """The slowest link a group crosses whose members are `stride` ranks apart.

        Ranks are numbered node by node, so a group of `ranks` with `stride` stays in a node iff
        ranks x stride <= devices_per_node. The fabric's bandwidth is divided by the oversubscription.
        Raises ValueError when the group needs a fabric and there is none.
        """
        if ranks * stride <= self.devices_per_node or ranks == 1:
            return self.node
        if self.fabric is None:
            raise ValueError(
                f"cluster {self.name}: {ranks} ranks {stride} apart leave a node of {self.devices_per_node}, "
                f"and it has no fabric between nodes; add `fabric` to the cluster file or use fewer GPUs"
            )
        return replace(self.fabric, bandwidth=self.fabric.bandwidth / self.oversubscription)

    def with_device(self, **changes: Any) -> Cluster:
        """The same cluster with fields of its device replaced."""
        return replace(self, device=replace(self.device, **changes))
