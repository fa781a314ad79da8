"""Symmetric memory of a group on one host: who can share, whose segment is whose, how much there is.

Each rank makes an anonymous file (memfd) and sends its descriptor to the peers over a unix socket in the abstract
namespace. Nothing gets a name in the file system, so nothing collides and nothing stays after SIGKILL.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import limits
from ._native import _C
from .config import settings

__all__ = ["agreed", "exchange", "on_release", "pass_descriptors", "refuse", "release", "rendezvous"]

_HANDSHAKE_SECONDS = 60.0
_TOKEN_BYTES = 16
# measured: 32 to 40 ns between cores that share a last-level cache, 240 to 260 ns between those that do not
_FAR_NANOSECONDS = 120.0

_closers: dict[
    str, list[Callable[[], None]]
] = {}  # by group: what gives back further memory that its ranks share


@dataclass(frozen=True)
class _Door:
    """Where a rank takes descriptors, and the token that shows who may give them."""

    address: str
    token: bytes


@dataclass(frozen=True)
class _Member:
    """What a rank tells the others before any memory is shared. Sizes in bytes."""

    host: tuple[str, str, str]
    pid: int
    door: _Door
    cores: tuple[int, ...]
    threads: int
    reserve: int
    half: int
    max_half: int
    first_epoch: int


def _host() -> tuple[str, str, str]:
    """Kernel, network and process namespace: only ranks equal in all three can pass descriptors and see pids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot, os.readlink("/proc/self/ns/net"), os.readlink("/proc/self/ns/pid")


def rendezvous(
    process_group: dist.ProcessGroup, *, timeout: float | None, workspace_bytes: int | None, first_epoch: int
) -> str:
    """Share memory among the ranks of the group. Collective.

    Returns "" on success, else why the group runs on torch.distributed instead; the same answer on every rank.
    Raises RuntimeError on every rank when a rank cannot get its memory.
    """
    name, rank, world_size = process_group.group_name, process_group.rank(), process_group.size()
    with _listener() as (server, address):
        half = (workspace_bytes or settings.workspace_bytes) // 2 // 4096 * 4096 or 4096
        member = _Member(
            host=_host(),
            pid=os.getpid(),
            door=_Door(address, secrets.token_bytes(_TOKEN_BYTES)),
            cores=tuple(sorted(os.sched_getaffinity(0))),
            threads=torch.get_num_threads(),
            reserve=limits.address_space(),
            half=half,
            max_half=max(half, settings.max_workspace_bytes // 2 // 4096 * 4096),
            first_epoch=first_epoch,
        )
        members: list[_Member] = exchange(process_group, member)
        fallback = _why_not_shared(members)
        if fallback:
            return fallback
        with agreed(process_group, name, lambda: _C.leave_group(name)):
            segment = _C.create_segment(
                rank=rank,
                world_size=world_size,
                reserve_bytes=max(min(m.reserve for m in members), 4096 + 2 * members[0].max_half),
                half_bytes=members[0].half,
                first_epoch=first_epoch & 0xFFFFFFFF,
            )
        with agreed(process_group, name, lambda: _C.leave_group(name)):
            descriptors = _pass_descriptors(server, [m.door for m in members], rank, segment.descriptor)
            try:
                _C.join_group(
                    name=name,
                    rank=rank,
                    own=segment,
                    descriptors=descriptors,
                    pids=[m.pid for m in members],
                    timeout=timeout or settings.timeout,
                    oversubscribed=_oversubscribed(members, rank),
                    first_epoch=first_epoch & 0xFFFFFFFF,
                    half_bytes=members[0].half,
                    max_half_bytes=members[0].max_half,
                )
            finally:
                for descriptor in descriptors:
                    if descriptor >= 0:
                        os.close(descriptor)
        # which stores pay depends on how far apart the cores are; rank 0 measures it for all
        latencies = exchange(process_group, _C.probe_latency(name))
        _C.set_streaming(name, latencies[0] > _FAR_NANOSECONDS)
    return ""


def release(name: str) -> None:
    """Unmap a group's memory. Peers that still call its ops raise CollectiveAborted."""
    for close in _closers.pop(name, []):
        close()
    _C.leave_group(name)


def on_release(name: str, close: Callable[[], None]) -> None:
    """Call `close` when the group's memory is given back."""
    _closers.setdefault(name, []).append(close)


def pass_descriptors(process_group: dist.ProcessGroup, own: int) -> list[int]:
    """Every rank gives the others a file descriptor. Returns theirs, -1 at the own place; the caller closes them.

    Collective; for groups that share memory already.
    """
    with _listener() as (server, address):
        doors: list[_Door] = exchange(process_group, _Door(address, secrets.token_bytes(_TOKEN_BYTES)))
        return _pass_descriptors(server, doors, process_group.rank(), own)


def refuse(name: str, text: str) -> None:
    """Use up this rank's turn in a call it cannot make, so that peers in it raise CollectiveAborted with `text`."""
    _C.refuse(name, text)


def exchange(process_group: dist.ProcessGroup, mine: Any) -> list[Any]:
    """What every rank gives, in rank order."""
    everyone = [None] * process_group.size()
    dist.all_gather_object(everyone, mine, group=process_group)
    return everyone


@contextmanager
def agreed(
    process_group: dist.ProcessGroup, name: str, undo: Callable[[], None] | None = None
) -> Iterator[None]:
    """Run the body; when it fails on any rank, every rank calls `undo` and raises with that rank's reason."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    failures = {
        r: text for r, text in enumerate(exchange(process_group, str(error) if error else "")) if text
    }
    if failures:
        if undo is not None:
            undo()
        rank, text = next(iter(failures.items()))
        raise RuntimeError(f"interlace: group {name!r} cannot share memory, rank {rank}: {text}") from error


def _why_not_shared(members: list[_Member]) -> str:
    if len(members) > _C.MAX_RANKS:
        return f"{len(members)} ranks; shared memory serves up to {_C.MAX_RANKS} on one host"
    hosts = {m.host for m in members}
    if len(hosts) > 1:
        return f"the ranks are on {len(hosts)} hosts (or containers with namespaces of their own)"
    first = members[0]
    for rank, member in enumerate(members):
        if (member.half, member.max_half, member.first_epoch) != (
            first.half,
            first.max_half,
            first.first_epoch,
        ):
            raise ValueError(
                f"interlace.init: rank {rank} asks for another workspace or first_epoch than rank 0; "
                "pass the same values (and the same INTERLACE_* variables) on every rank"
            )
    return ""


def _oversubscribed(members: list[_Member], rank: int) -> bool:
    cores = len({core for m in members for core in m.cores})
    threads = sum(m.threads for m in members)
    if threads > cores and cores >= len(members) and rank == 0:
        warnings.warn(
            f"interlace: {len(members)} ranks run {threads} threads on {cores} cores; call torch.set_num_threads("
            f"{max(1, cores // len(members))}) or set OMP_NUM_THREADS before starting, waiting ranks slow the others",
            stacklevel=5,
        )
    return threads > cores


@contextmanager
def _listener() -> Iterator[tuple[socket.socket, str]]:
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)) as server:
        address = "\0interlace-" + secrets.token_hex(16)
        server.bind(address)
        server.listen(_C.MAX_RANKS)
        server.settimeout(_HANDSHAKE_SECONDS)
        yield server, address


def _pass_descriptors(server: socket.socket, doors: list[_Door], rank: int, own: int) -> list[int]:
    """Descriptors of all ranks' segments, -1 at the own place. Connects to lower ranks, is called by higher ones."""
    descriptors = [-1] * len(doors)
    calls = []
    for peer in range(rank):
        call = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        call.settimeout(_HANDSHAKE_SECONDS)
        call.connect(doors[peer].address)
        _send(call, doors[peer].token, rank, own)
        calls.append((peer, call))
    for _ in range(rank + 1, len(doors)):
        call, _peer_address = server.accept()
        call.settimeout(_HANDSHAKE_SECONDS)
        peer, descriptor = _receive(call, doors[rank].token)
        descriptors[peer] = descriptor
        _send(call, doors[peer].token, rank, own)
        call.close()
    for peer, call in calls:
        with closing(call):
            _, descriptors[peer] = _receive(call, doors[rank].token)
    return descriptors


def _send(call: socket.socket, token: bytes, rank: int, descriptor: int) -> None:
    # the token is the receiver's: it came through the process group, so a stranger cannot know it
    socket.send_fds(call, [token + struct.pack("<i", rank)], [descriptor])


def _receive(call: socket.socket, token: bytes) -> tuple[int, int]:
    message, descriptors, _, _ = socket.recv_fds(call, _TOKEN_BYTES + 4, 1, socket.MSG_CMSG_CLOEXEC)
    if (
        len(message) != _TOKEN_BYTES + 4
        or not secrets.compare_digest(message[:_TOKEN_BYTES], token)
        or not descriptors
    ):
        raise RuntimeError("a process that is not of this group answered on its socket")
    return struct.unpack("<i", message[_TOKEN_BYTES:])[0], descriptors[0]
