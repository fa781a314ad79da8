"""Several groups at once, overlapping groups, meshes, and calls that follow each other on one workspace."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import interlace
import interlace.functional as il
from tests import oracle
from tests.distributed import run_distributed, subgroup
from tests.ops.linears import OPS, Case, check, compare, forward_backward


def overlapping(rank: int, world_size: int) -> None:
    """[0,1], [1,2], WORLD and a second [0,1] take turns; rank 1 is in all of them."""
    pairs = [subgroup([0, 1]), subgroup([1, 2]), dist.group.WORLD, dist.new_group([0, 1])]
    members = [{0, 1}, {1, 2}, {0, 1, 2}, {0, 1}]
    for turn in range(6):
        for number, (group, ranks) in enumerate(zip(pairs, members, strict=True)):
            if rank in ranks:
                for name in OPS:
                    check(name, Case((3 + turn,), 30, 17, torch.bfloat16, seed=10 * turn + number), group)


def test_overlapping_groups_do_not_share_state() -> None:
    """Catches counters or buffers kept per process instead of per group, and two groups of equal ranks
    mixed up."""
    run_distributed(3, overlapping)


def disjoint(rank: int, world_size: int) -> None:
    low, high = subgroup([0, 1]), subgroup([2, 3])
    mine = low if rank < 2 else high
    for turn in range(20 if rank < 2 else 5):  # the pairs run at their own pace
        for name in OPS:
            check(name, Case((turn,), 33, 9, seed=turn), mine)
    dist.barrier()


def test_disjoint_groups_run_at_their_own_pace() -> None:
    """Catches a set-up or a wait that involves ranks outside the group."""
    run_distributed(4, disjoint)


def mesh_of_two_axes(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for turn, axis in itertools.product(range(4), ("tp", "dp")):
        info = interlace.resolve(mesh[axis])
        if (info.rank, info.world_size) != (mesh.get_local_rank(axis), 2):
            raise AssertionError(f"axis {axis}: {info}, mesh says rank {mesh.get_local_rank(axis)}")
        for name in OPS:
            case = Case((8 + turn,), 20, 11, seed=turn)
            local = OPS[name][0](case, info.rank, 2)
            compare(f"{name} on {axis}", case, local, forward_backward(name, case, local, mesh[axis]))
        by_name = il.all_reduce(torch.ones(3), group=mesh[axis].get_group().group_name)
        oracle.check_equal("all_reduce by group name", by_name, torch.full((3,), 2.0))


def test_both_axes_of_a_mesh_are_groups() -> None:
    """Catches a mesh axis that resolves to the whole mesh, and group names that are not accepted."""
    run_distributed(4, mesh_of_two_axes)


def alternating(rank: int, world_size: int, backend_bytes: int) -> None:
    interlace.destroy()
    interlace.init(workspace_bytes=backend_bytes)
    for turn in range(5):
        for m, n in [(8, 16), (5, 3), (64, 40), (65, 200), (1500, 300), (1, 1), (0, 7), (130, 64)]:
            for position, name in enumerate(OPS):
                dtype = (torch.float32, torch.bfloat16)[(turn + position) % 2]
                check(name, Case((m,), 48, n, dtype, seed=turn * m + n))


@pytest.mark.parametrize("workspace_bytes", [4096, 64 << 20])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ops_alternate_with_changing_shapes_on_one_workspace(world_size: int, workspace_bytes: int) -> None:
    """Catches a buffer overwritten before the slowest peer has read it, and growth that one rank decides
    alone."""
    run_distributed(world_size, alternating, workspace_bytes, timeout=120)


def in_flight(rank: int, world_size: int) -> None:
    """Outputs of many calls are kept and looked at only at the end: none may alias the workspace."""
    outs = []
    for turn in range(50):
        x = torch.full((turn % 7 + 1, 4), float(turn + rank))
        weight = torch.eye(4)
        outs.append((turn, il.linear_all_reduce(x, weight, group=None)))
        outs.append((turn, il.all_reduce(x, group=None)))
        outs.append((turn, il.linear_reduce_scatter(x.repeat(world_size, 1), weight, group=None)))
        gathered = il.all_gather_linear(x, weight, group=None)
        oracle.check_equal(
            "block of rank 0", gathered[: x.shape[0]], torch.full((x.shape[0], 4), float(turn)).double()
        )
        x.fill_(float("nan"))  # the input is the caller's again as soon as the call returns
    for turn, out in outs:
        expected = float(world_size * turn + world_size * (world_size - 1) // 2)
        oracle.check_equal(f"call {turn}", out, torch.full(out.shape, expected).double())


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_outputs_and_inputs_belong_to_the_caller_after_the_call(world_size: int) -> None:
    """Catches outputs that live in the workspace, and peers that still read an input after its owner
    returned."""
    run_distributed(world_size, in_flight)


def recreated(rank: int, world_size: int) -> None:
    for turn in range(5):
        group = dist.new_group(list(range(world_size)))
        check("linear_all_reduce", Case((5,), 12, 7, seed=turn), group)
        check("all_gather_linear", Case((9,), 12, 7, seed=turn), group)
        if turn % 2:
            interlace.destroy(group)  # else dropped with the process group
        dist.destroy_process_group(group)


@pytest.mark.parametrize("world_size", [2, 3])
def test_groups_can_be_made_and_dropped_again_and_again(world_size: int) -> None:
    """Catches state that survives its group and meets the next group of the same name."""
    run_distributed(world_size, recreated)


def init_destroy(rank: int, world_size: int) -> list[tuple[int, int]]:
    seen = []
    for turn in range(5):
        interlace.destroy()
        interlace.destroy()  # nothing there: no error
        info = interlace.init(timeout=20.0)
        seen.append((info.rank, info.world_size))
        check("linear_reduce_scatter", Case((5,), 12, 7, seed=turn))
        try:
            interlace.init()
        except ValueError as error:
            if "destroy" not in str(error):
                raise
        else:
            raise AssertionError("a second init was accepted")
    return seen


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_init_and_destroy_five_times(world_size: int) -> None:
    """Catches descriptors, names or counters that survive destroy."""
    results = run_distributed(world_size, init_destroy)
    assert results == [[(rank, world_size)] * 5 for rank in range(world_size)]
