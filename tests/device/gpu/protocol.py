"""The protocol under stress on real memory: drifting ranks, stragglers, deadlines, abort, graph replay, two streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from interlace import CollectiveAborted, CollectiveTimeout
from interlace.device import Workspace
from tests.device.gpu import launches
from tests.device.gpu.correctness import Case
from tests.device.gpu.launches import OPS, Behind, Group, Options
from tests.device.gpu.problems import Source, exact_product, rounded, total
from tests.oracle import check_equal

TIMED_OUT, ABORTED = 1, 2
DTYPE = torch.bfloat16
LAG_CYCLES = 200_000  # about 0.1 ms


def cases() -> Iterator[Case]:
    """Everything of this part; needs a GPU."""
    for name in ("all_gather_gemm", "copy engine", "gemm_reduce_scatter", "gemm_all_reduce", "all_reduce"):
        yield Case(f"ranks drift: {name}", lambda n=name: ranks_drift(n))
    yield Case("epochs pass the wrap", epochs_pass_the_wrap)
    for name in ("all_gather_gemm", "copy engine", "gemm_all_reduce"):
        yield Case(f"a graph replays 1000 times: {name}", lambda n=name: graph_replays(n))
    yield Case("two streams in flight", two_streams_in_flight)
    yield Case("a deadline leaves a record and a working context", deadline_leaves_a_record)
    yield Case("a deadline inside a GEMM", deadline_inside_a_gemm)
    yield Case("the host stops a waiting kernel", host_stops_a_wait)
    yield Case("an abort reaches every rank", abort_reaches_every_rank)
    yield Case("launches that cannot be resident are refused", residency_is_checked)


class Step:
    """One call of an op on fresh numbers: `launch(workspace)` per rank, then `check()`."""

    def __init__(self, group: Group, name: str, seed: int) -> None:
        self.group, self.name = group, name
        source, world = Source("cuda", seed), group.world_size
        self.rows = [64 + 40 * ((seed + rank) % 3) for rank in range(world)]
        self.xs = [source.integers(r, 256, dtype=DTYPE) for r in self.rows]
        self.weights = [source.integers(136, 256, dtype=DTYPE) for _ in range(world)]
        self.whole = [source.integers(sum(self.rows), 256, dtype=DTYPE) for _ in range(world)]
        count = sum(self.rows)
        sizes = {"gemm_reduce_scatter": self.rows, "all_reduce": [256] * world}.get(name, [count] * world)
        self.outs = [launches.poisoned(self.xs[0], size, 136) for size in sizes]
        self.scatter = name == "gemm_reduce_scatter"

    def half_bytes(self) -> int:
        """Staging that this call needs."""
        count = sum(self.rows)
        gather = OPS._device_half_bytes_all_gather_gemm(self.rows, 256, 2)
        of_scatter = OPS._device_half_bytes_gemm_reduce(
            self.rows, self.group.world_size, True, 136, 2, False, False
        )
        everywhere = OPS._device_half_bytes_gemm_reduce(
            [count], self.group.world_size, False, 136, 2, False, False
        )
        return max(gather, of_scatter, everywhere, 256 * 136 * 2 * 2)

    def launch(self, workspace: Workspace) -> None:
        """This rank's call, on the current stream."""
        rank, tail = workspace.rank, workspace.tail
        weight, out = self.weights[rank], self.outs[rank]
        if self.name in ("all_gather_gemm", "copy engine"):
            comm_blocks = 0 if self.name == "copy engine" else 2
            OPS._device_all_gather_gemm(
                self.xs[rank], [weight], [None], None, [], None, [out], self.rows, *tail, 128, 0, comm_blocks
            )
        elif self.name == "all_reduce":
            OPS._device_one_shot_all_reduce([self._summand(rank)], [out], *tail, 8)
        else:
            rows = [self.rows] if self.scatter else []
            op = OPS._device_gemm_reduce_scatter if self.scatter else OPS._device_gemm_all_reduce
            behind = (None, None, None, 0.0, None, [], out, None)
            op([self.whole[rank]], [weight], *behind, *rows, False, False, *tail, 128, 0, 0)

    def _summand(self, rank: int) -> Tensor:
        return self.weights[rank].t()[:, :136].contiguous()

    def check(self) -> None:
        """Every rank's result is exact."""
        for rank, out in enumerate(self.outs):
            check_equal(f"{self.name}, rank {rank}", out, rounded(self.expected(rank), DTYPE))

    def expected(self, rank: int) -> Tensor:
        """In fp64."""
        if self.name in ("all_gather_gemm", "copy engine"):
            return exact_product(torch.cat(self.xs), self.weights[rank])
        if self.name == "all_reduce":
            return total([self._summand(r) for r in range(self.group.world_size)])
        value = total([exact_product(x, w) for x, w in zip(self.whole, self.weights, strict=True)])
        begin = sum(self.rows[:rank])
        return value[begin : begin + self.rows[rank]] if self.scatter else value


def steps_of(group: Group, name: str, count: int) -> list[Step]:
    """Calls in a row, with room for the largest."""
    steps = [Step(group, name, seed) for seed in range(count)]
    group.room_for(max(step.half_bytes() for step in steps))
    return steps


def run_on_streams(
    group: Group, steps: Sequence[Step], before: Callable[[int, int], None] = lambda step, rank: None
) -> None:
    """Every rank makes all its calls on its own stream; nothing else keeps the ranks together."""
    torch.cuda.synchronize()
    for index, step in enumerate(steps):
        for workspace, stream in zip(group.ranks.workspaces, group.ranks.streams, strict=True):
            with torch.cuda.stream(stream):
                before(index, workspace.rank)
                step.launch(workspace)
    group.synchronize()


def ranks_drift(name: str, count: int = 40) -> None:
    """Would catch: staging overwritten while a slow rank still reads it; needs launches that really overlap."""
    for world_size in (2, 4, 8):
        group = Group(world_size, 0, "cuda")
        steps = steps_of(group, name, count)

        def lag(index: int, rank: int) -> None:
            if (index * 7 + rank * 3) % 5 == 0:
                torch.cuda._sleep(LAG_CYCLES)

        run_on_streams(group, steps, lag)
        for step in steps:
            step.check()


def set_epochs(group: Group, epoch: int) -> None:
    """As if so many calls had been made: every word that counts epochs."""
    signed = epoch - 2**32 if epoch >= 2**31 else epoch
    group.synchronize()
    for rank in range(group.world_size):
        words = group.ranks.control(rank).view(torch.int32)
        layout = OPS._device_epoch_words()
        for begin, count in zip(layout[::2], layout[1::2], strict=True):
            words[begin : begin + count] = signed
    torch.cuda.synchronize()


def epochs_pass_the_wrap() -> None:
    """Would catch: epochs compared as plain numbers."""
    for name in ("all_gather_gemm", "copy engine", "gemm_all_reduce", "all_reduce"):
        group = Group(3, 0, "cuda")
        steps = steps_of(group, name, 12)
        set_epochs(group, 2**32 - 7)
        run_on_streams(group, steps)
        for step in steps:
            step.check()


def graph_replays(name: str, replays: int = 1000) -> None:
    """Would catch: an epoch or a half baked into the launch: the second replay would read the first one's rows."""
    group = Group(4, 0, "cuda")
    steps = steps_of(group, name, 3)

    def once() -> None:
        for step in steps:
            group.each(step.launch)

    once()
    group.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    for replay in range(replays):
        fresh = replay % 100 == 0
        if fresh:
            for step in steps:
                for x in (*step.xs, *step.whole):
                    x.copy_(x.roll(1 + replay // 100, 1))
                for out in step.outs:
                    out.fill_(float("nan"))
        graph.replay()
        if fresh:
            torch.cuda.synchronize()
            for step in steps:
                step.check()
    group.synchronize()
    for step in steps:
        step.check()


def two_streams_in_flight(count: int = 30) -> None:
    """Would catch: two ops of one set of ranks that share words: each has a region of its own."""
    pairs = [Group(2, 0, "cuda"), Group(2, 0, "cuda")]
    calls = [steps_of(pairs[0], "all_gather_gemm", count), steps_of(pairs[1], "gemm_all_reduce", count)]
    torch.cuda.synchronize()
    share = OPS._device_multiprocessors(0) // 4
    for index in range(count):
        for group, steps in zip(pairs, calls, strict=True):
            for workspace, stream in zip(group.ranks.workspaces, group.ranks.streams, strict=True):
                with torch.cuda.stream(stream):
                    launch_with(steps[index], workspace, share)
    for group, steps in zip(pairs, calls, strict=True):
        group.synchronize()
        for step in steps:
            step.check()


def launch_with(step: Step, workspace: Workspace, blocks: int) -> None:
    """The same call with a block budget: two groups share the device."""
    rank, tail, weight = workspace.rank, workspace.tail, step.weights[workspace.rank]
    out = step.outs[rank]
    if step.name == "all_gather_gemm":
        OPS._device_all_gather_gemm(
            step.xs[rank], [weight], [None], None, [], None, [out], step.rows, *tail, 128, blocks, 2
        )
    else:
        behind = (None, None, None, 0.0, None, [], out, None)
        OPS._device_gemm_all_reduce(
            [step.whole[rank]], [weight], *behind, False, False, *tail, 128, blocks, 0
        )


def deadline_leaves_a_record() -> None:
    """Would catch: a kernel that spins for ever when a rank never comes, or takes the CUDA context with it."""
    group = Group(3, 64, "cuda", timeout=0.2)
    launches.barrier(group, 0, 1)
    state, text = group.ranks.failure(0)
    assert state == TIMED_OUT, (state, text)
    assert "barrier, rank 0: no answer from rank" in text and "wanted epoch 1, seen epoch 0" in text, text
    launches.barrier(group, 1, 2)  # too late: rank 0 has told them
    for rank in (1, 2):
        state, text = group.ranks.failure(rank)
        assert state == ABORTED and "rank 0 gave up" in text, (state, text)
    expect(CollectiveTimeout, group.ranks.check)
    group.ranks.reset()
    launches.barrier(group)
    group.synchronize()


def deadline_inside_a_gemm() -> None:
    """Would catch: a mainloop or a reducer that never ends when a peer's rows do not come."""
    for name in ("all_gather_gemm", "copy engine", "gemm_reduce_scatter", "gemm_all_reduce"):
        group = Group(3, 0, "cuda", timeout=0.2)
        (step,) = steps_of(group, name, 1)
        torch.cuda.synchronize()
        for workspace in group.ranks.workspaces[:2]:
            with torch.cuda.stream(group.ranks.streams[workspace.rank]):
                step.launch(workspace)
        states = [group.ranks.failure(rank)[0] for rank in range(2)]
        assert TIMED_OUT in states and 0 not in states, (name, states)
        group.ranks.reset()
        group.each(step.launch)
        group.synchronize()
        step.check()


def host_stops_a_wait() -> None:
    """Would catch: an abort request that nobody polls. The time-out of 20 s would report another state."""
    group = Group(2, 64, "cuda")
    launches.barrier(group, 0, 1)
    group.ranks.request_abort(0)
    assert group.ranks.failure(0)[0] == ABORTED


def abort_reaches_every_rank() -> None:
    """Would catch: peers that wait out the deadline when one rank fails outside a kernel."""
    group = Group(3, 64, "cuda")
    launches.barrier(group, 0, 2)
    workspace = group.ranks.workspaces[2]
    OPS._device_abort(*workspace.tail, workspace.device)
    for rank in (0, 1):
        state, text = group.ranks.failure(rank)
        assert state == ABORTED and "rank 2 gave up" in text, (state, text)
    expect(CollectiveAborted, group.ranks.check)


def residency_is_checked() -> None:
    """Would catch: blocks that wait for blocks which never start."""
    group = Group(8, 1 << 20, "cuda")
    x = torch.zeros(16, device="cuda")
    expect(
        RuntimeError,
        lambda: OPS._device_one_shot_all_reduce([x], [x.clone()], *group.ranks.workspaces[0].tail, 64),
        "do not fit",
    )
    everywhere = launches.gemm_reduce
    weights = [[torch.zeros(8, 64, device="cuda", dtype=DTYPE)]] * 8
    xs = [[torch.zeros(4, 64, device="cuda", dtype=DTYPE)]] * 8
    expect(
        RuntimeError,
        lambda: everywhere(group, xs, weights, None, Behind(), Options(blocks=100, comm_blocks=0)),
        "do not fit",
    )


def expect(kind: type[Exception], call: Callable[[], object], text: str = "") -> None:
    """The call raises this kind of exception."""
    try:
        call()
    except kind as error:
        assert text in str(error), str(error)
    else:
        raise AssertionError(f"no {kind.__name__}")
