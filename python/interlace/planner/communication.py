"""Time of collectives: alpha-beta, by algorithm and link."""

from __future__ import annotations

from math import ceil, log2

from ._check import at_least, one_of
from .cluster import Link

__all__ = [
    "ALL_REDUCE_ALGORITHMS",
    "all_gather_seconds",
    "all_reduce_seconds",
    "all_to_all_seconds",
    "best_all_reduce",
    "hierarchical_all_reduce_seconds",
    "reduce_scatter_seconds",
    "send_seconds",
]

ALL_REDUCE_ALGORITHMS = ("ring", "tree", "multimem", "one_shot", "two_shot")


def all_reduce_seconds(bytes: float, ranks: int, link: Link, algorithm: str = "ring") -> float:  # noqa: A002
    """Seconds to sum `bytes` (the whole message, held by every rank) over `ranks` ranks.

    With n ranks, S bytes, rate B = bandwidth x efficiency (bytes/s, one direction), latency a:
    ring: 2 (n - 1) a + 2 (n - 1) / n S / B. tree: 2 ceil(log2 n) a + 2 S / B (pipelined double tree).
    one_shot: a + (n - 1) S / B, every rank reads all. two_shot: 2 a + 2 (n - 1) / n S / B over a switch that joins
    all pairs. multimem: 2 a + (1 + 1/n) S / B, the switch reduces and multiplies (NVLink SHARP).
    "auto" is the fastest of those the link has. Raises ValueError for multimem on a link without multicast.
    Source: alpha-beta model, Thakur, Rabenseifner, Gropp 2005; NCCL's ring bus bandwidth 2 (n - 1) / n.
    """
    at_least("all_reduce_seconds", 1, ranks=ranks)
    if algorithm == "auto":
        return best_all_reduce(bytes, ranks, link)[1]
    one_of("all_reduce_seconds", "algorithm", algorithm, (*ALL_REDUCE_ALGORITHMS, "auto"))
    _message("all_reduce_seconds", bytes)
    if algorithm == "multimem" and not link.multicast:
        raise ValueError(
            f"all_reduce_seconds: link {link.name} has no multicast; multimem needs NVLink SHARP"
        )
    if ranks == 1 or bytes == 0:
        return 0.0
    steps, volume = {
        "ring": (2 * (ranks - 1), 2 * (ranks - 1) / ranks),
        "tree": (2 * ceil(log2(ranks)), 2.0),
        "one_shot": (1, float(ranks - 1)),
        "two_shot": (2, 2 * (ranks - 1) / ranks),
        "multimem": (2, 1 + 1 / ranks),
    }[algorithm]
    return steps * link.latency + volume * bytes / link.rate


def best_all_reduce(bytes: float, ranks: int, link: Link) -> tuple[str, float]:  # noqa: A002
    """(algorithm, seconds) of the fastest all-reduce on this link.

    one_shot and two_shot need every pair of ranks joined, so they are tried in a domain only (link.ranks > 0).
    """
    possible = ["ring", "tree"]
    if 0 < ranks <= link.ranks:
        possible += ["one_shot", "two_shot"]
        if link.multicast:
            possible.append("multimem")
    timed = [(all_reduce_seconds(bytes, ranks, link, name), name) for name in possible]
    seconds, name = min(timed)
    return name, seconds


def all_gather_seconds(bytes: float, ranks: int, link: Link) -> float:  # noqa: A002
    """Seconds to gather `bytes` (the gathered size) on every rank: (n - 1) (a + S / (n B)).

    Ring; S / n is each rank's part. Source: Thakur et al. 2005.
    """
    at_least("all_gather_seconds", 1, ranks=ranks)
    _message("all_gather_seconds", bytes)
    if ranks == 1 or bytes == 0:
        return 0.0
    return _ring_steps(ranks, link) * link.latency + (ranks - 1) / ranks * bytes / link.rate


def reduce_scatter_seconds(bytes: float, ranks: int, link: Link) -> float:  # noqa: A002
    """Seconds to sum `bytes` (the size before the scatter) and leave 1/n on each rank: (n - 1) (a + S / (n B)).

    Ring. Source: Thakur et al. 2005.
    """
    return all_gather_seconds(bytes, ranks, link)


def all_to_all_seconds(bytes: float, ranks: int, link: Link) -> float:  # noqa: A002
    """Seconds to exchange `bytes` (what one rank sends to all, itself included): a + (n - 1) / n S / B.

    Messages to all peers are posted at once, so latency counts once. Source: Thakur et al. 2005.
    """
    at_least("all_to_all_seconds", 1, ranks=ranks)
    _message("all_to_all_seconds", bytes)
    if ranks == 1 or bytes == 0:
        return 0.0
    return link.latency + (ranks - 1) / ranks * bytes / link.rate


def send_seconds(bytes: float, link: Link) -> float:  # noqa: A002
    """Seconds for one message of `bytes` from rank to rank: a + S / B."""
    _message("send_seconds", bytes)
    return link.latency + bytes / link.rate


def hierarchical_all_reduce_seconds(
    bytes: float,  # noqa: A002
    inside: int,
    nodes: int,
    node: Link,
    fabric: Link,
) -> float:
    """Seconds of reduce-scatter in the node, all-reduce between nodes of each 1/inside, all-gather in the node.

    2 (i - 1) (a_n + S / (i B_n)) + ring or tree of S / i over `nodes` ranks on the fabric, where each of the `inside`
    ranks of a node has its own share of it. Source: Thakur et al. 2005; NCCL's channel per NIC.
    """
    part = 2 * all_gather_seconds(bytes, inside, node)
    across = min(all_reduce_seconds(bytes / inside, nodes, fabric, name) for name in ("ring", "tree"))
    return part + across


def _ring_steps(ranks: int, link: Link) -> int:
    # in a domain where every pair is joined all parts travel at once: one latency instead of n - 1
    return 1 if 0 < ranks <= link.ranks else ranks - 1


def _message(op: str, size: float) -> None:
    if not size >= 0:
        raise ValueError(f"{op}: bytes={size!r}; expected a number >= 0")
