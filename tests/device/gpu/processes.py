"""Several GPUs, one process each: memory from torch's symmetric memory, real links, the same ops and checks."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from interlace import CollectiveAborted, CollectiveTimeout, device
from tests.device.gpu import launches
from tests.device.gpu.problems import Source, exact_product, rounded, total
from tests.device.gpu.public import check_public
from tests.oracle import check_equal

OPS = torch.ops.interlace
DTYPE = torch.bfloat16
SHAPES = ((136, 72), (520, 264), (1024, 1096))


def run(rank: int, world_size: int, port: int, failures: Any) -> None:
    """One process. Puts the text of what went wrong, or "", into failures."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size)
    )
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    name = dist.group.WORLD.group_name
    here = torch.device("cuda", rank)
    try:
        reason = device.unavailable(name, here)
        assert reason == "", reason
        for turn, (n, k) in enumerate(SHAPES):
            check_ops(name, here, turn, n, k)
        check_public(here)
        check_streams_and_graph(name, here)
        check_deadline(name, here)
        failures.put("")
    except Exception as error:
        failures.put(f"rank {rank}: {type(error).__name__}: {error}")
    finally:
        device.destroy(name)
        dist.destroy_process_group()


def everyone(value: torch.Tensor) -> list[torch.Tensor]:
    """The tensor of every rank, of any length of dim 0."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value.cpu())
    return [v.to(value.device) for v in found]


def check_ops(name: str, here: torch.device, turn: int, n: int, k: int, *, repeats: int = 3) -> None:
    """The three fused ops, by kernel and by copy engine, on uneven shards; the workspace grows on the way."""
    world, rank = dist.get_world_size(), dist.get_rank()
    rows = [64 + 33 * ((turn + r) % 3) for r in range(world)]
    source = Source(str(here), 100 * turn + rank)
    for repeat in range(repeats):
        x = source.integers(rows[rank], k, dtype=DTYPE)
        weight = source.integers(n, k, dtype=DTYPE)
        whole = source.integers(sum(rows), k, dtype=DTYPE)
        half = OPS._device_half_bytes_all_gather_gemm(rows, k, 2)
        space = device.workspace(name, here, half)
        out = launches.poisoned(x, sum(rows), n)
        gathered = torch.empty(sum(rows), k, dtype=DTYPE, device=here)
        OPS._device_all_gather_gemm(
            x, [weight], [None], None, [], gathered, [out], rows, *space.tail, 128, 0, 4 * (repeat % 2)
        )
        torch.cuda.synchronize()
        device.check(space)
        xs = torch.cat(everyone(x))
        check_equal("gathered", gathered.double(), xs.double())
        check_equal("all_gather_gemm", out, rounded(exact_product(xs, weight), DTYPE))
        sums = total([exact_product(a, b) for a, b in zip(everyone(whole), everyone(weight), strict=True)])
        begin = sum(rows[:rank])
        for scatter in (True, False):
            of = rows if scatter else [sum(rows)]
            half = OPS._device_half_bytes_gemm_reduce(of, world, scatter, n, 2, False, False)
            space = device.workspace(name, here, half)
            mine = sums[begin : begin + rows[rank]] if scatter else sums
            out = launches.poisoned(x, mine.shape[0], n)
            behind = (None, None, None, 0.0, None, [], out, None)
            op = OPS._device_gemm_reduce_scatter if scatter else OPS._device_gemm_all_reduce
            op([whole], [weight], *behind, *([rows] if scatter else []), False, False, *space.tail, 128, 0, 4)
            torch.cuda.synchronize()
            device.check(space)
            check_equal("scatter" if scatter else "all-reduce", out, rounded(mine, DTYPE))


def check_streams_and_graph(name: str, here: torch.device) -> None:
    """A stream of its own has a region of its own; a graph captured after a warm-up replays."""
    world, rank = dist.get_world_size(), dist.get_rank()
    x = torch.full((1000,), float(rank + 1), device=here)
    out = torch.empty_like(x)
    half = OPS._device_half_bytes_one_shot(1, 1000, 4)
    first = device.workspace(name, here, half)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        second = device.workspace(name, here, half)
        assert second.segments != first.segments, "two streams share a region"
        OPS._device_one_shot_all_reduce([x], [out], *second.tail, 4)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = device.workspace(name, here, half)
        OPS._device_one_shot_all_reduce([x], [out], *captured.tail, 4)
        try:
            device.workspace(name, here, 1 << 34)
        except RuntimeError as error:
            assert "warm up" in str(error), str(error)
        else:
            raise AssertionError("a workspace grew under capture")
    for replay in range(1000):
        if replay % 100 == 0:
            x.fill_(float(rank + replay))
        graph.replay()
        if replay % 100 == 0:
            expected = float(sum(r + replay for r in range(world)))
            assert torch.equal(out, torch.full_like(out, expected)), f"replay {replay}"
    torch.cuda.synchronize()
    device.check_group(name)


def check_deadline(name: str, here: torch.device) -> None:
    """The last rank never comes: the others raise, the process lives, the group starts again."""
    world, rank = dist.get_world_size(), dist.get_rank()
    device.destroy(name)
    dist.barrier()
    x = torch.ones(8, device=here)
    space = device.workspace(name, here, 4096, timeout=0.5)
    dist.barrier()
    if rank != world - 1:
        OPS._device_one_shot_all_reduce([x], [torch.empty_like(x)], *space.tail, 1)
        torch.cuda.synchronize()
        try:
            device.workspace(name, here, 4096)
        except (CollectiveTimeout, CollectiveAborted) as error:
            assert f"rank {rank}" in str(error), str(error)
        else:
            raise AssertionError("nobody raised")
    dist.barrier()
    device.destroy(name)
    dist.barrier()
    space = device.workspace(name, here, 4096)
    out = torch.empty_like(x)
    OPS._device_one_shot_all_reduce([x], [out], *space.tail, 1)
    torch.cuda.synchronize()
    assert torch.equal(out, torch.full_like(out, float(world)))


def main() -> int:
    """All GPUs of this machine, at most eight. Returns how many ranks ran; raises AssertionError."""
    world_size = min(torch.cuda.device_count(), 8)
    if world_size < 2:
        return 0
    context = torch.multiprocessing.get_context("spawn")
    failures = context.Queue()
    port = 20_000 + os.getpid() % 20_000
    ranks = [context.Process(target=run, args=(r, world_size, port, failures)) for r in range(world_size)]
    for process in ranks:
        process.start()
    texts = [failures.get(timeout=120) for _ in ranks]
    for process in ranks:
        process.join(timeout=30)
    wrong = [text for text in texts if text]
    assert not wrong, "\n".join(wrong)
    return world_size
