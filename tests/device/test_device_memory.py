"""`interlace.device` without a GPU: which memory a call uses, who can share it, how failures come back.

The CUDA library and the few calls of torch that touch a device are replaced; processes and their groups are real.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace.device import VirtualRanks, registry
from interlace.device.peers import Member, Peers, TorchMemory, segment_addresses, why_not
from interlace.device.regions import MAX_REGIONS, Regions, grown
from interlace.device.workspace import HostPage, Tail, Workspace, raise_failure
from tests.distributed import run_distributed

CONTROL_BYTES = 2304
STATE_OFFSET = 4


class FakeNative:
    """The CUDA library's ops on host memory."""

    def __init__(self) -> None:
        self.aborted: list[int] = []

    def segment_bytes(self, half_bytes: int) -> int:
        return CONTROL_BYTES + 2 * half_bytes

    def page_layout(self) -> tuple[int, int]:
        return 64, STATE_OFFSET

    def failure(self, page: int) -> tuple[int, str]:
        state = ctypes.c_uint32.from_address(page + STATE_OFFSET).value
        return (
            state,
            "barrier, rank 0: no answer from rank 1, chunk 0 (block 0): wanted epoch 3, seen epoch 2",
        )

    def request_abort(self, page: int) -> None:
        ctypes.c_uint32.from_address(page).value = 1

    def abort(self, tail: Tail, device: int) -> None:
        self.aborted.append(device)

    def read_addresses(self, address: int, count: int, device: int) -> list[int]:
        return list((ctypes.c_int64 * count).from_address(address))


def record(page: HostPage, state: int) -> None:
    """What a kernel does when it leaves early."""
    ctypes.c_uint32.from_address(page.address + STATE_OFFSET).value = state


def workspace(half_bytes: int, page: HostPage | None = None) -> Workspace:
    pages = () if page is None else (page,)
    return Workspace(
        group_name="tp",
        device=0,
        rank=0,
        world_size=2,
        half_bytes=half_bytes,
        segments=(128, 256),
        pages=tuple(p.address for p in pages),
        multicast=0,
        timeout=2.5,
        host_pages=pages,
    )


class FakeRegion:
    def __init__(self, half_bytes: int) -> None:
        self.workspace = workspace(half_bytes)
        self.closed = False

    def close(self) -> None:
        self.closed = True


class FakeProvider:
    """Both ranks of a pair in one: `other` is what the other rank decides, None for the same."""

    def __init__(self) -> None:
        self.opened: list[FakeRegion] = []
        self.agreements: list[Any] = []
        self.other: Any = None

    def open(self, half_bytes: int) -> FakeRegion:
        self.opened.append(FakeRegion(half_bytes))
        return self.opened[-1]

    def agree(self, decision: Any) -> list[Any]:
        assert all(not region.closed or region is not self.opened[-1] for region in self.opened)
        self.agreements.append(decision)
        return [decision, decision if self.other is None else self.other]


@pytest.fixture
def provider() -> FakeProvider:
    return FakeProvider()


@pytest.fixture
def regions(provider: FakeProvider) -> Regions:
    return Regions("tp", provider, least=4096)


def test_streams_never_share_a_region(regions: Regions, provider: FakeProvider) -> None:
    """Would catch: two ops in flight on two streams that count their epochs in one place."""
    first = regions.workspace(1, 100, capturing=False)
    second = regions.workspace(2, 100, capturing=False)
    assert first is not second
    assert regions.workspace(1, 4096, capturing=False) is first
    assert [a[0] for a in provider.agreements] == ["add", "add"]


def test_a_region_grows_once_and_the_old_one_goes(regions: Regions, provider: FakeProvider) -> None:
    """Would catch: growth for each larger call, memory of the small region kept."""
    assert regions.workspace(1, 100, capturing=False).half_bytes == 4096
    assert regions.workspace(1, 4097, capturing=False).half_bytes == 8192
    assert [region.closed for region in provider.opened] == [True, False]
    assert regions.workspace(1, 4097, capturing=False).half_bytes == 8192
    assert len(provider.agreements) == 2
    assert len(regions.workspaces()) == 1


def test_growth_is_the_next_power_of_two() -> None:
    """Would catch: a size that depends on this rank's history and differs from the peers'."""
    assert grown(0, 1, 4096) == 4096
    assert grown(4096, 4097, 4096) == 8192
    assert grown(8192, 3 << 20, 4096) == 4 << 20
    assert grown(0, 5, 1) == 4096


def test_ranks_that_disagree_are_told_who_does_what(regions: Regions, provider: FakeProvider) -> None:
    """Would catch: a rendezvous of different sizes, or one rank that waits in it alone."""
    provider.other = ("add", 0, 8192)
    with pytest.raises(ValueError, match=r"rank 1 adds region 0 with halves of 8192 bytes; every rank must"):
        regions.workspace(1, 100, capturing=False)
    assert provider.opened == []


def test_nothing_is_set_up_while_a_graph_is_captured(regions: Regions, provider: FakeProvider) -> None:
    """Would catch: a rendezvous inside a capture, which would fail or hang without a hint."""
    with pytest.raises(RuntimeError, match=r"needs 100 bytes .* has 0, .* warm up first"):
        regions.workspace(1, 100, capturing=True)
    regions.workspace(1, 100, capturing=False)
    with pytest.raises(RuntimeError, match=r"needs 4097 bytes .* has 4096"):
        regions.workspace(1, 4097, capturing=True)
    assert len(provider.agreements) == 1


def test_a_capture_takes_over_the_region_of_the_warm_up(regions: Regions, provider: FakeProvider) -> None:
    """Would catch: no way to capture (torch captures on a stream of its own), or a region that two streams share."""
    warm = regions.workspace(1, 100, capturing=False)
    assert regions.workspace(7, 100, capturing=True) is warm
    assert regions.workspace(7, 100, capturing=True) is warm
    after = regions.workspace(1, 100, capturing=False)
    assert after is not warm
    assert provider.agreements[-1][0] == "add"


def test_memory_of_a_captured_graph_outlives_growth(regions: Regions, provider: FakeProvider) -> None:
    """Would catch: a graph that replays into unmapped memory after a larger call on its stream."""
    regions.workspace(1, 100, capturing=False)
    captured = regions.workspace(1, 100, capturing=True)
    regions.workspace(1, 10_000, capturing=False)
    assert not provider.opened[0].closed
    assert captured in regions.workspaces()
    regions.close()
    assert all(region.closed for region in provider.opened)


def test_streams_without_end_are_refused(regions: Regions) -> None:
    """Would catch: a segment leaked for every stream a program ever made."""
    for stream in range(MAX_REGIONS):
        regions.workspace(stream, 100, capturing=False)
    with pytest.raises(ValueError, match=rf"more than {MAX_REGIONS} streams; .* long-lived"):
        regions.workspace(MAX_REGIONS, 100, capturing=False)
    regions.workspace(0, 100_000, capturing=False)  # growth needs no further region


MEMBER = Member("host", "gpu-0", (9, 0))


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ([MEMBER, Member("host", "gpu-1", (9, 0))], ""),
        ([MEMBER, Member("host", "gpu-0", (9, 0))], "ranks 0 and 1 use the same GPU"),
        ([MEMBER, Member("other", "gpu-1", (9, 0))], "2 hosts"),
        ([MEMBER, Member("host", "gpu-1", (8, 0))], "different compute capabilities"),
        (
            [
                Member("host", "gpu-0", (9, 0), unreachable=frozenset({"gpu-1"})),
                Member("host", "gpu-1", (9, 0)),
            ],
            "the GPUs of ranks 0 and 1 cannot access",
        ),
        ([Member("host", "gpu-0", (9, 0), unreachable=frozenset({"gpu-7"}))], ""),
        ([Member("host", "gpu-0", (7, 5))], "compute capability 7.5"),
        ([MEMBER, Member("host", "", (0, 0), "expected a CUDA device, got cpu")], "rank 1: expected a CUDA"),
        ([Member("host", f"gpu-{i}", (9, 0)) for i in range(9)], "9 ranks; the fused kernels serve up to 8"),
    ],
    ids=["fits", "same GPU", "hosts", "mixed", "apart", "others apart", "old", "cpu", "nine"],
)
def test_who_can_share_memory(members: list[Member], reason: str) -> None:
    """Would catch: a rendezvous that cannot succeed, or an answer that differs between ranks."""
    answer = why_not(members)
    assert reason in answer
    assert bool(answer) == bool(reason)


def test_addresses_with_and_without_the_offset_of_the_allocation() -> None:
    """Would catch: segments that begin at another rank's tensor, when torch reports where the allocation begins."""
    assert segment_addresses([4096, 8192], 0, 1, 8192) == ([4096, 8192], 0)
    assert segment_addresses([4096, 8192], 256, 1, 8448) == ([4352, 8448], 256)
    assert segment_addresses([4352, 8448], 256, 0, 4352) == ([4352, 8448], 0)
    with pytest.raises(RuntimeError, match="does not know"):
        segment_addresses([4096, 8192], 256, 0, 5000)
    with pytest.raises(RuntimeError, match="not aligned to 128"):
        segment_addresses([4096, 8200], 0, 0, 4096)


@pytest.mark.parametrize(
    ("state", "error"), [(1, interlace.CollectiveTimeout), (2, interlace.CollectiveAborted)]
)
def test_a_record_becomes_an_exception_with_its_text(state: int, error: type[Exception]) -> None:
    """Would catch: a failure that nobody raises, or one without rank, peer, chunk and epochs."""
    page = HostPage(FakeNative(), pinned=False)
    assert page.address % 64 == 0
    here = workspace(4096, page)
    assert not here.failed
    raise_failure(here)
    record(page, state)
    assert here.failed
    with pytest.raises(
        error, match=r"'tp'.*no answer from rank 1, chunk 0.*epoch 3.*epoch 2.*interlace.destroy"
    ):
        raise_failure(here)
    page.clear()
    raise_failure(here)


def test_a_failure_of_any_region_is_raised_at_the_next_call(
    monkeypatch: pytest.MonkeyPatch, regions: Regions, provider: FakeProvider
) -> None:
    """Would catch: a failure on one stream that a call on another one passes over."""
    regions.workspace(1, 100, capturing=False)
    page = HostPage(FakeNative(), pinned=False)
    provider.opened[0].workspace = workspace(4096, page)
    regions.workspace(2, 100, capturing=False)
    monkeypatch.setitem(registry._groups, "tp", regions)
    registry.check_group("tp")
    record(page, 1)
    with pytest.raises(interlace.CollectiveTimeout, match=r"waited 2\.5 s"):
        registry.check_group("tp")
    registry.check_group("a group without GPU memory")


def test_the_tail_is_in_the_order_of_the_schemas() -> None:
    """Would catch: an argument that slips into its neighbour's place."""
    page = HostPage(FakeNative(), pinned=False)
    assert workspace(4096, page).tail == ([128, 256], [page.address], 0, 4096, 0, 2.5)


def test_virtual_ranks_have_segments_of_their_own() -> None:
    """Would catch: segments that overlap or are not aligned; a page that two ranks write."""
    ranks = VirtualRanks(3, 1000, native=FakeNative(), memory_device="cpu")
    half = ranks.workspace.half_bytes
    assert half == 1024
    segments = ranks.workspace.segments
    assert all(address % 128 == 0 for address in segments)
    assert segments[1] - segments[0] >= CONTROL_BYTES + 2 * half
    assert [w.rank for w in ranks.workspaces] == [0, 1, 2]
    assert all(w.pages == ranks.workspace.pages and w.segments == segments for w in ranks.workspaces)
    for rank in range(3):
        assert ranks.control(rank).data_ptr() == segments[rank]
        assert ranks.halves(rank).data_ptr() == segments[rank] + CONTROL_BYTES
        assert ranks.halves(rank).numel() == 2 * half
    record(ranks.workspaces[1].host_pages[0], 2)
    assert [ranks.failure(rank)[0] for rank in range(3)] == [0, 2, 0]
    with pytest.raises(interlace.CollectiveAborted):
        ranks.check()
    ranks.reset()
    ranks.check()
    assert ranks.control(1).sum() == 0
    assert torch.isnan(ranks.halves(1).view(torch.bfloat16)).all()


@pytest.mark.parametrize("world_size", [0, 9])
def test_virtual_ranks_refuse_other_worlds(world_size: int) -> None:
    """Would catch: pointer tables written past their end."""
    with pytest.raises(ValueError, match="serve 1 to 8 ranks"):
        VirtualRanks(world_size, 0, native=FakeNative(), memory_device="cpu")


class SharedHost(TorchMemory):
    """Symmetric memory as torch would report it, in host memory that no peer can reach."""

    def __init__(
        self, rank: int, *, fails_on: int = -1, multicast: int = 1 << 20, device_only: bool = False
    ) -> None:
        self.rank, self.fails_on, self.multicast = rank, fails_on, multicast
        self.device_only = device_only
        self.calls: list[str] = []

    def allocate(self, nbytes: int, device: int) -> torch.Tensor:
        if self.rank == self.fails_on:
            raise RuntimeError("out of memory")
        self.calls.append("allocate")
        spare = torch.full((nbytes + 128,), 0xFF, dtype=torch.uint8)
        first = -spare.data_ptr() % 128
        return spare[first : first + nbytes]

    def rendezvous(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> Any:
        assert int(tensor.sum()) == 0, "shared before it was zero"
        assert self.calls[-1] == "synchronize", "shared before the zeros were written"
        addresses: list[Any] = [None] * group.size()
        dist.all_gather_object(addresses, tensor.data_ptr(), group=group)
        self.table = (ctypes.c_int64 * len(addresses))(*addresses)
        return SimpleNamespace(
            buffer_ptrs=[] if self.device_only else addresses,
            buffer_ptrs_dev=ctypes.addressof(self.table),
            multicast_ptr=self.multicast,
            offset=0,
        )

    def synchronize(self, device: int) -> None:
        self.calls.append("synchronize")


def _open_with_peers(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    native = FakeNative()

    def provider(memory: SharedHost) -> Peers:
        return Peers(group=group, device=0, timeout=2.0, native=native, memory=memory, pinned=False)

    region = provider(SharedHost(rank)).open(4096)
    here = region.workspace
    assert (here.rank, here.world_size, here.half_bytes, here.multicast) == (rank, world_size, 4096, 1 << 20)
    assert len(here.segments) == world_size
    assert len(here.pages) == 1
    # a back end that tells the addresses to the device only
    memory = SharedHost(rank, device_only=True)
    assert provider(memory).open(4096).workspace.segments == tuple(memory.table)
    # multicast that one rank lacks is used by none
    lame = provider(SharedHost(rank, multicast=0 if rank == 1 else 1 << 20)).open(4096)
    assert lame.workspace.multicast == 0
    with pytest.raises(RuntimeError, match="rank 1: out of memory"):
        provider(SharedHost(rank, fails_on=1)).open(4096)
    growing = Regions(group.group_name, provider(SharedHost(rank)), least=4096)
    growing.workspace(1, 100, capturing=False)
    with pytest.raises(ValueError, match="set up different workspaces"):
        growing.workspace(1, 5000 if rank == 0 else 50_000, capturing=False)
    # the CPU half of the same group is asked first, and says no on every rank alike
    reason = registry.unavailable(group.group_name, torch.device("cpu"))
    assert reason == "rank 0: expected a CUDA device, got cpu"
    assert registry.unavailable(group.group_name, torch.device("cpu")) == reason
    assert not registry.multicast(group.group_name, torch.device("cpu"))
    registry.destroy(group.group_name)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_set_up_memory_together(world_size: int) -> None:
    """Would catch: memory shared before it is zero, one rank's failure that leaves the others in a rendezvous."""
    run_distributed(world_size, _open_with_peers)
