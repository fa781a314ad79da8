"""Time of a collective over a group of ranks that may fill nodes in part: the node's link and the fabric together."""

from __future__ import annotations

from dataclasses import dataclass

from .cluster import Cluster, Link
from .communication import (
    all_gather_seconds,
    all_to_all_seconds,
    best_all_reduce,
    hierarchical_all_reduce_seconds,
    send_seconds,
)

__all__ = ["Group"]


@dataclass(frozen=True)
class Group:
    """`ranks` ranks that are `stride` apart, numbered node by node.

    inside: members that share a node. nodes: how many nodes the group touches. link: the slowest link it crosses.
    """

    cluster: Cluster
    ranks: int
    stride: int
    inside: int
    nodes: int
    link: Link

    @staticmethod
    def of(cluster: Cluster, ranks: int, stride: int = 1) -> Group:
        """The group of a mesh axis. Raises ValueError when it needs a fabric the cluster does not have."""
        inside = max(1, min(ranks, cluster.devices_per_node // stride))
        return Group(cluster, ranks, stride, inside, -(-ranks // inside), cluster.link(ranks, stride))

    def all_gather(self, size: float) -> float:
        """Seconds to gather `size` bytes (the gathered size) on every rank.

        In a node, or one member per node: (n - 1) (a + S / (n B)). Else the `inside` members of each node carry
        1 / inside of the bytes between nodes, each over its own share of the fabric, while the node's link spreads
        what arrived: the slower of the two. Source: Thakur et al. 2005; the rings of NCCL, one per NIC.
        """
        if self.nodes == 1 or self.inside == 1:
            return all_gather_seconds(size, self.ranks, self.link)
        across = all_gather_seconds(size / self.inside, self.nodes, self.link)
        return max(across, all_gather_seconds(size, self.inside, self.cluster.node))

    def reduce_scatter(self, size: float) -> float:
        """Seconds to sum `size` bytes and leave 1/n on each rank; the gather run backwards."""
        return self.all_gather(size)

    def all_reduce(self, size: float) -> float:
        """Seconds to sum `size` bytes on every rank: the fastest of flat, two-level, and scatter then gather."""
        flat = best_all_reduce(size, self.ranks, self.link)[1]
        if self.nodes == 1 or self.inside == 1:
            return flat
        levels = hierarchical_all_reduce_seconds(size, self.inside, self.nodes, self.cluster.node, self.link)
        return min(flat, levels, 2 * self.all_gather(size))

    def all_to_all(self, size: float) -> float:
        """Seconds to exchange `size` bytes, what one rank sends to all, itself included.

        Between nodes (n - i) / n S at the fabric's rate and (i - 1) / n S at the node's, at the same time.
        """
        if self.nodes == 1 or self.inside == 1:
            return all_to_all_seconds(size, self.ranks, self.link)
        across = size * (self.ranks - self.inside) / self.ranks / self.link.rate
        within = size * (self.inside - 1) / self.ranks / self.cluster.node.rate
        return self.link.latency + max(across, within)

    def send(self, size: float) -> float:
        """Seconds of one message of `size` bytes to the next member."""
        return send_seconds(size, self.link) if self.ranks > 1 else 0.0
