"""The device kernels on a real GPU, by virtual ranks on one device: `make test-gpu`.

The emulator checks the protocol; only here do the memory orders of the hardware, the compiler's work and graph replay
count.
"""

from __future__ import annotations

import pytest
import torch

from tests.device.virtual_ranks import ABORTED, TIMED_OUT, VirtualRanks


def _reason_to_skip() -> str | None:
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    import interlace  # loads the op libraries

    assert interlace is not None
    if not hasattr(torch.ops.interlace, "_device_barrier"):
        return "needs interlace_cuda.so: build with nvcc and a CUDA torch"
    return None


SKIP = _reason_to_skip()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(SKIP is not None, reason=f"cuda: {SKIP}")]

WORLDS = (1, 2, 3, 4, 8)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COUNTS = (0, 1, 7, 8, 9, 1000, 4096, 65537)


def _inputs(world_size: int, count: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Small integers, different on every rank: their sums are exact in every dtype."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return [
        torch.randint(-8, 9, (count,), device="cuda", generator=generator).to(dtype)
        for _ in range(world_size)
    ]


def _sum(inputs: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([x.double() for x in inputs]).sum(0)


def _check_all(outs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
    for rank, out in enumerate(outs):
        assert torch.equal(out.double(), _sum(inputs)), f"rank {rank} of {len(outs)}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world_size", WORLDS)
def test_one_shot_all_reduce_sums_every_size(world_size: int, dtype: torch.dtype) -> None:
    """Would catch: tails, misaligned starts, a wrong peer, a half used twice in a row."""
    ranks = VirtualRanks(world_size, max(COUNTS) * dtype.itemsize)
    for seed, count in enumerate(COUNTS * 2):
        inputs = _inputs(world_size, count, dtype, seed)
        outs = [torch.full_like(x, float("nan")) for x in inputs]
        ranks.all_reduce(inputs, outs, blocks=1 + seed % 8)
        _check_all(outs, inputs)
        if count > 1:
            inputs, outs = [x[1:] for x in inputs], [out[:-1] for out in outs]
            ranks.all_reduce(inputs, outs, blocks=4)
            _check_all(outs, inputs)
    assert all(ranks.failure(rank).state == 0 for rank in range(world_size))


def test_ranks_on_their_own_streams_may_drift(count: int = 30_000, launches: int = 300) -> None:
    """Would catch: staging overwritten while a slow rank still reads it; needs real concurrency between launches."""
    world_size = 4
    ranks = VirtualRanks(world_size, count * 4, first_epoch=2**32 - 100)
    inputs = [_inputs(world_size, count, torch.float32, seed) for seed in range(launches)]
    outs = [[torch.full_like(x, float("nan")) for x in step] for step in inputs]
    streams = [torch.cuda.Stream() for _ in range(world_size)]
    torch.cuda.synchronize()
    for step in range(launches):
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if (step * 7 + rank) % 13 == 0:
                    torch.cuda._sleep(200_000)  # about 0.1 ms: this rank lags
                ranks.all_reduce([inputs[step][rank]], [outs[step][rank]], blocks=8, first_rank=rank)
    torch.cuda.synchronize()
    assert all(ranks.failure(rank).state == 0 for rank in range(world_size))
    for step in range(launches):
        _check_all(outs[step], inputs[step])
    assert ranks.epoch(0) == launches - 100


def test_a_captured_graph_replays(replays: int = 1000) -> None:
    """Would catch: an epoch baked into the launch; the second replay would read the first one's sums."""
    world_size, count = 4, 5000
    ranks = VirtualRanks(world_size, count * 2)
    inputs = _inputs(world_size, count, torch.bfloat16, seed=0)
    outs = [torch.empty_like(x) for x in inputs]
    ranks.all_reduce(inputs, outs, blocks=4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ranks.all_reduce(inputs, outs, blocks=4)
        ranks.barrier()
        ranks.all_reduce(inputs, outs, blocks=2)
    for replay in range(replays):
        if replay % 100 == 0:
            for x, fresh in zip(inputs, _inputs(world_size, count, torch.bfloat16, replay), strict=True):
                x.copy_(fresh)
        graph.replay()
        if replay % 100 == 0:
            _check_all(outs, inputs)
    torch.cuda.synchronize()
    assert ranks.epoch(0) == 1 + 3 * replays
    assert ranks.failure(0).state == 0


def test_a_deadline_leaves_a_record_and_a_working_context() -> None:
    """Would catch: a kernel that spins for ever when a rank never comes, or takes the CUDA context with it."""
    ranks = VirtualRanks(3, 64, timeout=0.2)
    ranks.barrier(first_rank=0, ranks=1)
    failure = ranks.failure(0)
    assert failure.state == TIMED_OUT
    assert (failure.rank, failure.want, failure.seen) == (0, 1, 0)
    assert failure.peer in (1, 2)
    ranks.barrier(first_rank=1, ranks=2)  # too late: rank 0 has told them
    assert ranks.failure(1).state == ABORTED
    assert ranks.failure(1).peer == 0
    ranks.reset()
    ranks.barrier()
    assert all(ranks.failure(rank).state == 0 for rank in range(3))


def test_the_host_stops_a_waiting_kernel() -> None:
    """Would catch: an abort request that nobody polls. The time-out of 20 s would report another state."""
    ranks = VirtualRanks(2, 64)
    ranks.barrier(first_rank=0, ranks=1)
    ranks.request_abort(0)
    assert ranks.failure(0).state == ABORTED


def test_launches_that_cannot_be_resident_are_refused() -> None:
    """Would catch: blocks that wait for blocks which never start."""
    ranks = VirtualRanks(8, 1024)
    inputs = _inputs(8, 16, torch.float32, seed=0)
    with pytest.raises(RuntimeError, match="do not fit"):
        ranks.all_reduce(inputs, [torch.empty_like(x) for x in inputs], blocks=64)
    with pytest.raises(RuntimeError, match="do not fit into a half"):
        big = _inputs(8, 1000, torch.float32, seed=0)
        ranks.all_reduce(big, [torch.empty_like(x) for x in big], blocks=1)
    ranks.barrier()
    assert ranks.failure(0).state == 0


def test_timings_are_printed() -> None:
    """Medians of one launch that plays all ranks, in us: a figure to watch, not a gate. Sums are checked."""
    for world_size in (2, 8):
        for count in (2048, 32768, 524288):
            ranks = VirtualRanks(world_size, count * 2)
            inputs = _inputs(world_size, count, torch.bfloat16, seed=1)
            outs = [torch.empty_like(x) for x in inputs]
            times = []
            for _ in range(30):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                ranks.all_reduce(inputs, outs, blocks=16)
                end.record()
                torch.cuda.synchronize()
                times.append(1e3 * start.elapsed_time(end))
            _check_all(outs, inputs)
            median = sorted(times)[len(times) // 2]
            print(f"one_shot_all_reduce  {world_size} virtual ranks  {2 * count:>8} bytes  {median:8.1f} us")
