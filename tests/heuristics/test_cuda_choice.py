"""Which algorithm a call on CUDA tensors takes: decided from descriptions, so no GPU is needed."""

from __future__ import annotations

import dataclasses
import itertools
import warnings

import pytest

from interlace.cuda_dispatch.state import joined, tell
from interlace.hardware import KNOWN, Hardware, agreed
from interlace.heuristics import (
    ALGORITHMS,
    Decision,
    Entry,
    Launch,
    Problem,
    Table,
    bucket_of,
    choose,
    load,
    merged,
)
from interlace.heuristics.problem import OPS

H100, H200, A100, B200, L20 = (
    next(h for name, h in KNOWN.items() if part in name) for part in ("H100", "H200", "A100", "B200", "L20")
)
ALL = (H100, H200, A100, B200, L20)
TABLE = load()


def problem(op: str, rows: int, width: int = 8192, world_size: int = 8, **changes: object) -> Problem:
    fields = {
        "dtype": "bfloat16",
        "op": op,
        "rows": rows,
        "width": width,
        "world_size": world_size,
        **changes,
    }
    if "scaled" in op:
        fields = {
            "itemsize": 1,
            "out_dtype": "bfloat16",
            **fields,
            "dtype": changes.get("dtype", "float8_e4m3fn"),
        }
    return Problem(largest_dim=max(rows, width), **fields)  # type: ignore[arg-type]


def decide(hardware: Hardware, *args: object, demand: str = "", **changes: object) -> Decision:
    return choose(problem(*args, **changes), hardware, TABLE, demand)  # type: ignore[arg-type]


@pytest.mark.parametrize("hardware", ALL, ids=lambda h: h.name)
def test_long_calls_are_fused_and_short_ones_are_not(hardware: Hardware) -> None:
    """Catches a fused kernel at decode, where it loses, and none in training, where it wins."""
    for op in ("all_gather_gemm", "gemm_reduce_scatter", "gemm_reduce_scatter_norm", "gemm_all_reduce"):
        assert decide(hardware, op, 16384).algorithm == "fused", op
        assert decide(hardware, op, 8).algorithm == "one_shot", op
    # between: too large for one kernel, too short to hide anything
    assert decide(hardware, "all_gather_gemm", 512).algorithm == "baseline"
    assert decide(hardware, "gemm_all_reduce", 200).algorithm == "two_shot"


def test_a_fused_all_reduce_starts_earlier_where_the_switch_sums() -> None:
    """Catches one crossover for NVLS and for peer stores."""
    starts = {
        h.name: next(m for m in range(1, 2000) if decide(h, "gemm_all_reduce", m).algorithm == "fused")
        for h in ALL
    }
    assert starts == {h.name: 256 if h.multicast else 512 for h in ALL}


def test_fp8_is_fused_on_hopper_alone() -> None:
    """Catches an e4m3 kernel on a GPU that has none, or an output type it does not write."""
    for op in ("all_gather_gemm_scaled", "gemm_reduce_scatter_scaled"):
        for hardware in ALL:
            decision = decide(hardware, op, 16384)
            assert (decision.algorithm == "fused") == (hardware.mainloop == "sm_90a"), hardware.name
        assert "need sm_90" in decide(L20, op, 16384).why_not("fused")
        assert "write bfloat16" in decide(H200, op, 16384, out_dtype="float32").why_not("fused")
        assert "float8_e5m2" in decide(H200, op, 16384, dtype="float8_e5m2").why_not("fused")
    assert "multiple of 16" in decide(H200, "all_gather_gemm_scaled", 16384, width=8200).why_not("fused")


REFUSALS = (
    ({"world_size": 9}, H200, "up to 8 ranks, the group has 9"),
    ({"world_size": 1}, H200, "nothing to communicate"),
    ({"dim_leads": False}, H200, "not in front"),
    ({"dtype": "float32", "itemsize": 4}, H200, "not float32"),
    ({"dtype": "float64", "itemsize": 8}, H200, "not float64"),
    ({"unavailable": "interlace_cuda.so is not built"}, H200, "is not built"),
    ({"products": 5}, H200, "up to 4 products"),
    ({"rows": 1 << 31}, H200, "2^31"),
    ({"rows": 300_000}, H200, "signals for 262144 rows"),
    ({"rows": 200_000}, dataclasses.replace(H200, memory=16 << 30), "1/8 of the GPU's memory"),
    ({"rows": 0}, H200, "no elements"),
    ({}, dataclasses.replace(L20, peer_access=False), "no P2P"),
    ({}, Hardware("Tesla V100", (7, 0), 80, 16 << 30), "compute capability 7.0"),
    ({}, Hardware("RTX 5090", (12, 0), 170, 32 << 30, "pcie"), "compute capability 12.0"),
)


@pytest.mark.parametrize(
    ("changes", "hardware", "words"), REFUSALS, ids=lambda v: v if isinstance(v, str) else ""
)
def test_what_the_fused_kernels_cannot_serve_is_said_and_served_otherwise(
    changes: dict[str, object], hardware: Hardware, words: str
) -> None:
    """Catches a candidate that is filtered in silence, a call that nobody serves, and one that fails in a kernel."""
    for op in ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce", "gemm_all_reduce_norm"):
        call = dataclasses.replace(problem(op, 16384), **changes)  # type: ignore[arg-type]
        call = dataclasses.replace(call, largest_dim=max(call.rows, call.width))
        decision = choose(call, hardware, TABLE)
        assert words in decision.why_not("fused"), (op, decision)
        assert decision.algorithm in ("decomposed", "baseline", "two_shot")
        with pytest.raises(ValueError, match=r"no kernel of ours|fused: "):
            choose(call, hardware, TABLE, "fused")


def test_decomposed_serves_what_has_no_peer_access_and_baseline_everything() -> None:
    """Catches a GPU on PCIe without P2P, or a group over hosts, that is left without overlap or without any way."""
    alone = dataclasses.replace(L20, peer_access=False)
    for op in ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce", "gemm_reduce_scatter_scaled"):
        assert decide(alone, op, 16384).algorithm == "decomposed"
        assert decide(alone, op, 16384, world_size=16).algorithm == "decomposed"
        assert decide(alone, op, 4).algorithm == "baseline"
    for op, dtype in itertools.product(("all_reduce", "reduce_scatter"), ("int64", "float64", "bool")):
        assert decide(H200, op, 64, dtype=dtype).algorithm == "baseline"
    assert decide(H200, "all_gather", 64, dtype="bool", itemsize=1).algorithm == "one_shot"
    assert decide(H200, "all_gather", 64, dtype="complex128", itemsize=16).algorithm == "baseline"


def test_every_call_has_a_way_a_reason_and_reasons_against_the_rest() -> None:
    """Every op x GPU x size: catches a hole in the rules. Equal arguments give the equal answer."""
    sizes = (1, 7, 64, 129, 500, 1024, 4096, 65536)
    for op, hardware, rows, world_size in itertools.product(OPS, ALL, sizes, (1, 2, 3, 8, 9)):
        decision = decide(hardware, op, rows, world_size=world_size)
        assert decision.algorithm in ALGORITHMS and decision.reason
        assert not decision.why_not(decision.algorithm)
        assert all(why for _, why in decision.rejected)
        assert decision.launch.tile_columns in (128, 256)
        assert 1 <= decision.launch.comm_blocks < hardware.multiprocessors
        assert decision == decide(hardware, op, rows, world_size=world_size)


def test_demands_are_met_or_refused_with_reasons() -> None:
    """interlace.backend("fused"), ("decomposed"), ("reference")."""
    for demand in ("decomposed", "baseline", "one_shot", "fused"):
        assert decide(H200, "gemm_all_reduce", 4096, demand=demand).algorithm == demand
    assert decide(H200, "gemm_all_reduce", 4, demand="ours").algorithm == "one_shot"
    assert decide(H200, "all_gather_gemm", 512, demand="ours").algorithm in ("fused", "one_shot")
    with pytest.raises(
        ValueError, match=r"gemm_all_reduce: no kernel of ours .*fused: the kernels serve up to 8"
    ):
        decide(H200, "gemm_all_reduce", 4096, world_size=9, demand="ours")


def entry(**changes: object) -> Entry:
    fields = {
        "gpu": H200.name, "world_size": 8, "dtype": "bfloat16", "op": "gemm_reduce_scatter", "rows": 512,
        "width": 8192, "algorithm": "fused", "launch": Launch(256, 4, 120, True), **changes,
    }  # fmt: skip
    return Entry(**fields)  # type: ignore[arg-type]


def test_measured_entries_win_over_crossovers_where_they_are_legal() -> None:
    """Catches a table of another GPU, world or bucket that is read, and one that overrules what is possible."""
    found = entry()
    table = merged(TABLE, Table({}, {found.key: found}))
    call = problem("gemm_reduce_scatter", 400)
    assert bucket_of(400) == 512
    decision = choose(call, H200, table)
    assert (decision.algorithm, decision.launch) == ("fused", Launch(256, 4, 120, True))
    assert decision.reason.startswith("tuned")
    for other, hardware in (
        (call, H100),
        (dataclasses.replace(call, world_size=4), H200),
        (dataclasses.replace(call, rows=600), H200),
        (dataclasses.replace(call, dtype="float16"), H200),
        (dataclasses.replace(call, width=4096), H200),
    ):
        assert choose(other, hardware, table).reason.startswith("tuned") is False
    blocked = dataclasses.replace(call, unavailable="no driver")
    assert choose(blocked, H200, table).algorithm == "baseline"
    assert choose(call, H200, table, "decomposed").algorithm == "decomposed"


def test_a_group_is_described_by_what_all_its_gpus_can_do() -> None:
    """Catches ranks that decide by their own GPU: they would take different ways and wait for each other."""
    same, why = agreed([H200] * 3)
    assert (same, why) == (H200, "")
    cut, why = agreed([H200, dataclasses.replace(H200, multiprocessors=120, multicast=False, link="pcie")])
    assert (cut.multiprocessors, cut.multicast, cut.link, why) == (120, False, "pcie", "")
    _, why = agreed([H100, A100])
    assert "different GPUs" in why and A100.name in why
    assert agreed([A100, H100])[1]


def test_a_group_tells_once_why_nothing_is_fused_and_takes_the_table_of_rank_0() -> None:
    """Catches a fallback in silence, and ranks that choose by different files."""
    other = merged(TABLE, Table({}, {entry().key: entry()})).to_json()
    state = joined([(H200, TABLE.to_json(), False), (H200, other, False)], "", True)
    assert state.table.digest == TABLE.digest and state.hardware.multicast
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tell("tp", 0, state)
        tell("tp", 1, joined([(H200, other, False)], "no P2P", False))
    with pytest.warns(UserWarning, match=r"group 'tp' go by torch.distributed.*no P2P"):
        tell("tp", 0, joined([(H200, other, False)], "no P2P", False))
    mixed = joined([(H200, other, False), (A100, other, False)], "", False)
    assert "different GPUs" in mixed.unavailable and not mixed.hardware.multicast
    assert not state.rank_order
    assert joined([(H200, other, False), (H200, other, True)], "", True).rank_order, "one rank is enough"
