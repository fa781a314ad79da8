"""What the ranks of a group agree on before their first call on CUDA tensors: hardware, memory, tuned table."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace

import torch
from torch.distributed.distributed_c10d import _resolve_process_group

from .. import device, heuristics, symmetric_memory
from ..hardware import Hardware, agreed, describe

__all__ = ["GroupState", "forget", "is_used", "joined", "known", "state_of"]


@dataclass
class GroupState:
    """Equal on all ranks of the group. decisions: what was chosen so far.

    rank_order: sums are taken in rank order, never by the switch, whose order is its own and may change between runs.
    """

    hardware: Hardware
    unavailable: str
    table: heuristics.Table
    rank_order: bool = False
    decisions: dict[tuple[heuristics.Problem, str], heuristics.Decision] = field(default_factory=dict)

    def choose(self, problem: heuristics.Problem, demand: str) -> heuristics.Decision:
        """heuristics.choose, remembered. ValueError when the demanded algorithm cannot serve the call."""
        key = problem, demand
        decision = self.decisions.get(key)
        if decision is None:
            decision = heuristics.choose(problem, self.hardware, self.table, demand)
            self.decisions[key] = decision
        return decision


_states: dict[str, GroupState] = {}


def state_of(op: str, group_name: str, on: torch.device) -> GroupState:
    """The group's state. Collective at the first call on CUDA tensors, answered from memory afterwards.

    Sums keep to rank order when torch.use_deterministic_algorithms was on then, on any rank.
    ValueError while a CUDA graph is captured before that first call.
    """
    state = _states.get(group_name)
    if state is not None:
        return state
    if torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"{op}: a CUDA graph is being captured and group {group_name!r} has not been used on this device yet; run "
            "the model once before the capture (on the same stream), as torch.cuda.graph asks for anyway"
        )
    process_group = _resolve_process_group(group_name)
    facts = describe(on), heuristics.load().to_json(), torch.are_deterministic_algorithms_enabled()
    unavailable = device.unavailable(group_name, on)
    multicast = not unavailable and device.multicast(group_name, on)
    state = joined(symmetric_memory.exchange(process_group, facts), unavailable, multicast)
    _states[group_name] = state
    tell(group_name, process_group.rank(), state)
    symmetric_memory.on_release(group_name, lambda: forget(group_name))
    return state


def tell(group_name: str, rank: int, state: GroupState) -> None:
    """Warn, once a group and on rank 0, when the fused kernels cannot serve its CUDA tensors at all."""
    if state.unavailable and rank == 0:
        warnings.warn(
            f"interlace: CUDA tensors of group {group_name!r} go by torch.distributed, in pieces or after the product: "
            f"{state.unavailable}",
            stacklevel=2,
        )


def joined(facts: list[tuple[Hardware, str, bool]], unavailable: str, multicast: bool) -> GroupState:
    """The state from (hardware, table as JSON, deterministic) of every rank, in rank order. Pure.

    Rank 0's table serves all; one rank that wants determinism is enough.
    """
    hardware, differ = agreed([h for h, _, _ in facts])
    origin = "of rank 0" if any(text != facts[0][1] for _, text, _ in facts) else "of this group"
    return GroupState(
        hardware=replace(hardware, multicast=multicast),
        unavailable=unavailable or differ,
        table=heuristics.parse(facts[0][1], origin),
        rank_order=any(deterministic for _, _, deterministic in facts),
    )


def forget(group_name: str) -> None:
    """A later group of this name agrees anew."""
    _states.pop(group_name, None)


def known(group_name: str) -> GroupState | None:
    """The group's state when it has one. Local."""
    return _states.get(group_name)


def is_used(group_name: str) -> bool:
    """Has the group been called on CUDA tensors?"""
    return group_name in _states
