"""The kernels of the CUDA key, on tensors without memory: the launches they make, the mistakes they refuse.

Nothing is computed here: launches are recorded, after the dispatcher has checked them against the schemas of the CUDA
library. What the kernels compute is tested under the emulator and on GPUs.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import interlace
from interlace import heuristics
from interlace.cuda_dispatch import KERNELS, deciding, state
from interlace.hardware import KNOWN
from interlace.parallelize.report import path_of
from tests.device.gpu.public import check_public
from tests.distributed import run_distributed
from tests.ops.device_schemas import Memory, Recorder, gpus, schemas

FP8 = torch.float8_e4m3fn
COLUMNS, DEPTH = 4096, 8192


def x(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The kernels of the CUDA key look at shapes, types and strides alone: a tensor without memory has them."""
    return torch.empty(shape, dtype=dtype, device="meta")


def samples(rows: int, own: int, name: str) -> dict[str, tuple[Any, ...]]:
    weight, bias, one = x(COLUMNS, DEPTH), x(COLUMNS, 2)[:, 1], x(1, dtype=torch.float32)
    turned = x(DEPTH, COLUMNS).t()  # the weight of a backward
    fp8, fp8_weight = x(rows, DEPTH, dtype=FP8), x(COLUMNS, DEPTH, dtype=FP8)
    return {
        "all_gather_gemm": (x(own, DEPTH), [weight, turned], [bias, None], 0, name, True, rows),
        "gemm_reduce_scatter": (x(rows, DEPTH + 4)[:, :DEPTH], weight, bias, 0, name),
        "gemm_all_reduce": (x(rows, DEPTH), turned, None, name),
        "sum_gemm_all_reduce": ([x(rows, DEPTH)] * 2, [weight, turned], name),
        "sum_gemm_reduce_scatter": ([x(1, rows, DEPTH)] * 2, [weight] * 2, 1, name),
        "gemm_all_reduce_norm": (x(rows, DEPTH), weight, bias, x(rows, COLUMNS), bias, 1e-6, name),
        "gemm_reduce_scatter_norm": (x(rows, 1, DEPTH), weight, None, x(own, 1, COLUMNS), bias, 1e-6, 0, name),
        "all_gather_gemm_scaled": (
            x(own, DEPTH, dtype=FP8), one, [fp8_weight], [one], [bias], torch.bfloat16, 0, name, rows,
        ),
        "gemm_reduce_scatter_scaled": (fp8, one, fp8_weight, one, bias, torch.bfloat16, 0, name),
        "all_reduce": (x(rows, 64), name),
        "all_gather": (x(own, 64), 0, name, rows),
        "reduce_scatter": (x(rows, 64), 0, name),
    }  # fmt: skip


def shapes(result: Any) -> list[list[int]]:
    flat = [
        t
        for r in (result if isinstance(result, list | tuple) else [result])
        for t in (r if isinstance(r, list) else [r])
    ]
    return [list(t.shape) for t in flat]


def launched(rank: int, world_size: int) -> list[dict[str, Any]]:
    """Algorithm, launches and shapes of the results of every op, for few rows and for many."""
    name = interlace.resolve(None).name
    seen = []
    with gpus(name) as recorder:
        for rows in (4 * world_size, 4096 * world_size):
            found = {}
            for op, args in samples(rows, rows // world_size, name).items():
                recorder.calls.clear()
                result = KERNELS[op](*args)
                check_calls(recorder.calls)
                found[op] = (interlace.last_path().algorithm, " ".join(recorder.launched), shapes(result))
            seen.append(found)
        seen.append(empty_parts(name, 4096 * world_size, recorder))
        recorder.calls.clear()
        KERNELS["gemm_all_reduce"](x(200, DEPTH), x(COLUMNS, DEPTH), x(COLUMNS), name)
        seen.append({"medium": (interlace.last_path().algorithm, " ".join(recorder.launched), [])})
    return seen


def switch_sums(rank: int, world_size: int, rank_order: bool) -> dict[str, list[bool]]:
    """Whether the launches of each reducing way let the switch sum."""
    name = interlace.resolve(None).name
    seen = {}
    with gpus(name, rank_order=rank_order) as recorder:
        for way, op, args in (
            ("fused", "gemm_all_reduce", (x(4096, DEPTH), x(COLUMNS, DEPTH), None, name)),
            ("fused rows", "gemm_reduce_scatter", (x(4096, DEPTH), x(COLUMNS, DEPTH), None, 0, name)),
            ("two_shot", "gemm_all_reduce", (x(200, DEPTH), x(COLUMNS, DEPTH), None, name)),
        ):
            recorder.calls.clear()
            KERNELS[op](*args)
            seen[way] = recorder.argument("use_multicast")
    return seen


@pytest.mark.parametrize("rank_order", [False, True])
def test_the_switch_sums_unless_runs_must_be_equal(rank_order: bool) -> None:
    """Catches sums in the switch's own order under torch.use_deterministic_algorithms."""
    for seen in run_distributed(2, switch_sums, rank_order):
        assert seen == {way: [not rank_order] for way in ("fused", "fused rows", "two_shot")}


def empty_parts(name: str, rows: int, recorder: Recorder) -> dict[str, Any]:
    """A rank without columns, without depth or without rows takes part: its peers wait for it."""
    found: dict[str, Any] = {}
    weight, none = x(COLUMNS, DEPTH), x(0, DEPTH)
    fp8, one = x(rows, 0, dtype=FP8), x(1, dtype=torch.float32)
    cases = {
        "no columns": ("all_gather_gemm", (x(rows // 2, DEPTH), [none], [None], 0, name, False, rows)),
        "one without": ("all_gather_gemm", (x(rows // 2, DEPTH), [none, weight], [None] * 2, 0, name, True, rows)),
        "no depth": ("gemm_all_reduce", (x(rows, 0), x(COLUMNS, 0), None, name)),
        "no depth, fp8": (
            "gemm_reduce_scatter_scaled",
            (fp8, one, x(COLUMNS, 0, dtype=FP8), one, None, torch.bfloat16, 0, name),
        ),
        "fp8 turned": (
            "all_gather_gemm_scaled",
            (
                x(rows // 2, DEPTH, dtype=FP8), one, [x(DEPTH, COLUMNS, dtype=FP8).t()], [one], [None],
                torch.bfloat16, 0, name, rows,
            ),
        ),
    }  # fmt: skip
    for what, (op, args) in cases.items():
        recorder.calls.clear()
        result = KERNELS[op](*args)
        check_calls(recorder.calls)
        found[what] = (recorder.launched, shapes(result))
    return found


def check_calls(calls: list[tuple[str, tuple[Any, ...]]]) -> None:
    """Tensors are rows of inner stride 1 or a weight's transpose; the tail is that of the workspace."""
    for name, values in calls:
        if "half_bytes" in name:
            continue
        at = next(
            i
            for i, v in enumerate(values)
            if isinstance(v, list) and all(isinstance(e, int) for e in v[:1]) and v[:1] == [128]
        )
        assert tuple(values[at : at + 6]) == Memory.tail, (name, values)
        if "gemm" in name:
            check_operands(name, *values[:2])
        flat = [t for v in values for t in (v if isinstance(v, list) else [v]) if isinstance(t, Tensor)]
        for tensor in flat:
            assert tensor.dim() <= 2, (name, tensor.shape)
            assert 1 in tensor.stride(), (name, tensor.stride())
            if tensor.dim() == 2 and tensor.shape[0] > 1 and tensor.shape[1] > 1:
                assert max(tensor.stride()) * tensor.element_size() % 16 == 0, (name, tensor.stride())


def check_operands(name: str, xs: Any, weights: list[Tensor]) -> None:
    """The weights of one launch lie one way, fp8 ones by rows of K, and nothing is empty."""
    by_rows = all(w.stride(1) == 1 for w in weights)
    assert by_rows or all(w.stride(0) == 1 for w in weights), (name, [w.stride() for w in weights])
    assert by_rows or weights[0].dtype is not FP8, name
    depth = (xs[0] if isinstance(xs, list) else xs).shape[1]
    assert depth > 0 and all(w.shape[0] > 0 and w.shape[1] == depth for w in weights), name


FEW = {
    "all_gather_gemm": "all_gather", "gemm_reduce_scatter": "reduce_scatter_norm",
    "gemm_all_reduce": "one_shot_all_reduce", "sum_gemm_all_reduce": "one_shot_all_reduce",
    "sum_gemm_reduce_scatter": "reduce_scatter", "gemm_all_reduce_norm": "one_shot_all_reduce_norm",
    "gemm_reduce_scatter_norm": "reduce_scatter_norm", "all_gather_gemm_scaled": "all_gather all_gather",
    "gemm_reduce_scatter_scaled": "reduce_scatter_norm", "all_reduce": "one_shot_all_reduce",
    "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
}  # fmt: skip
MANY = {
    "all_gather_gemm": "all_gather_gemm", "gemm_reduce_scatter": "gemm_reduce_scatter",
    "gemm_all_reduce": "gemm_all_reduce", "sum_gemm_all_reduce": "gemm_all_reduce",
    "sum_gemm_reduce_scatter": "gemm_reduce_scatter", "gemm_all_reduce_norm": "gemm_all_reduce",
    "gemm_reduce_scatter_norm": "gemm_reduce_scatter", "all_gather_gemm_scaled": "all_gather_gemm",
    "gemm_reduce_scatter_scaled": "gemm_reduce_scatter", "all_reduce": "two_shot_all_reduce",
    "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
}  # fmt: skip


def expected_shapes(rows: int, own: int) -> dict[str, list[list[int]]]:
    whole, part = [rows, COLUMNS], [own, COLUMNS]
    return {
        "all_gather_gemm": [[rows, DEPTH], whole, whole], "gemm_reduce_scatter": [part],
        "gemm_all_reduce": [whole], "sum_gemm_all_reduce": [whole],
        "sum_gemm_reduce_scatter": [[1, own, COLUMNS]], "gemm_all_reduce_norm": [whole, whole],
        "gemm_reduce_scatter_norm": [[own, 1, COLUMNS]] * 2, "all_gather_gemm_scaled": [whole],
        "gemm_reduce_scatter_scaled": [part], "all_reduce": [[rows, 64]], "all_gather": [[rows, 64]],
        "reduce_scatter": [[own, 64]],
    }  # fmt: skip


def test_every_op_launches_what_was_chosen_on_cuda_tensors() -> None:
    """Catches an argument in the wrong place of a launch, a shape that is lost, a path that is told and not taken."""
    assert "_device_gemm_all_reduce" in schemas()
    for few, many, empty, medium in run_distributed(2, launched):
        assert {op: kernels for op, (_, kernels, _) in few.items()} == FEW
        assert {op: kernels for op, (_, kernels, _) in many.items()} == MANY
        assert {op: found for op, (_, _, found) in few.items()} == expected_shapes(8, 4)
        assert {op: found for op, (_, _, found) in many.items()} == expected_shapes(8192, 4096)
        assert {algorithm for algorithm, _, _ in few.values()} == {"one_shot"}
        assert empty["no columns"] == (["all_gather_gemm"], [[0], [8192, 0]])
        assert empty["one without"] == (["all_gather_gemm"], [[8192, DEPTH], [8192, 0], [8192, COLUMNS]])
        assert empty["no depth"] == (["gemm_all_reduce"], [[8192, COLUMNS]])
        assert empty["no depth, fp8"] == (["gemm_reduce_scatter"], [[4096, COLUMNS]])
        assert empty["fp8 turned"] == (["all_gather_gemm"], [[8192, COLUMNS]])
        assert medium["medium"][:2] == ("two_shot", "two_shot_all_reduce_norm")


def mistakes(rank: int, world_size: int) -> list[str]:
    """Every mistake on every rank: text of the exception, and nothing launched."""
    name = interlace.resolve(None).name
    rows = x(8192, DEPTH)
    weight, bias = x(COLUMNS, DEPTH), x(COLUMNS)
    gather, reduce, norm = (
        KERNELS["all_gather_gemm"],
        KERNELS["gemm_all_reduce"],
        KERNELS["gemm_all_reduce_norm"],
    )
    scaled = KERNELS["gemm_reduce_scatter_scaled"]
    fp8, one = x(8, 64, dtype=FP8), x(1, dtype=torch.float32)
    calls: list[Callable[[], Any]] = [
        lambda: reduce(rows, weight.half(), bias, name),
        lambda: reduce(rows, torch.empty(COLUMNS, DEPTH, dtype=torch.bfloat16), bias, name),
        lambda: reduce(rows, weight[:, :64], bias, name),
        lambda: reduce(rows, weight, bias[:5], name),
        lambda: reduce(rows.int(), weight.int(), None, name),
        lambda: reduce(rows, weight, bias, "nowhere"),
        lambda: gather(rows, [weight], [None], 2, name, False, 16384),
        lambda: gather(rows, [], [], 0, name, False, 16384),
        lambda: gather(rows, [weight], [None], 0, name, False, 16384, [COLUMNS]),
        lambda: norm(rows, weight, bias, x(8, COLUMNS), bias, 1e-6, name),
        lambda: norm(rows, weight, bias, None, bias.float(), 1e-6, name),
        lambda: scaled(fp8.bfloat16(), one, fp8, one, None, torch.bfloat16, 0, name),
        lambda: scaled(fp8, x(3, dtype=torch.float32), fp8, one, None, torch.bfloat16, 0, name),
        lambda: scaled(fp8, one.half(), fp8, one, None, torch.bfloat16, 0, name),
    ]
    texts = []
    with gpus(name) as recorder:
        for call in calls:
            texts.append(refusal(call))
        with interlace.backend("fused"):
            texts.append(
                refusal(
                    lambda: reduce(
                        x(8192, DEPTH, dtype=torch.float64), x(9, DEPTH, dtype=torch.float64), None, name
                    )
                )
            )
        texts.append(f"launched {recorder.calls}")
    with gpus(name, warm=False, captured=True) as recorder:
        texts.append(refusal(lambda: reduce(rows, weight, bias, name)))
        texts.append(f"launched {recorder.calls}")
    with gpus(name, "the ranks are on 2 hosts") as recorder, interlace.backend("fused"):
        texts.append(refusal(lambda: reduce(rows, weight, bias, name)))
    return texts


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


WORDS = (
    "TypeError: gemm_all_reduce: x is torch.bfloat16, weight is torch.float16; cast one of them",
    "ValueError: gemm_all_reduce: x is on meta, weight on cpu; move one of them",
    "ValueError: gemm_all_reduce: x [8192, 8192] needs a weight [N, 8192], got [4096, 64]",
    "ValueError: gemm_all_reduce: expected a bias [4096], got [5]",
    "TypeError: gemm_all_reduce: x is torch.int32; expected float32",
    "ValueError: interlace: no process group is named 'nowhere'",
    "ValueError: all_gather_gemm: gather_dim=2 is out of range for a tensor of 2 dims",
    "ValueError: all_gather_gemm: 0 weights, 0 biases",
    "ValueError: all_gather_gemm: packed weights are for CPU kernels",
    "ValueError: gemm_all_reduce_norm: expected a residual [8192, 4096], got [8, 4096]",
    "TypeError: gemm_all_reduce_norm: x is torch.bfloat16, norm_weight is torch.float32",
    "TypeError: gemm_reduce_scatter_scaled: x is torch.bfloat16; expected float8_e4m3fn",
    "ValueError: gemm_reduce_scatter_scaled: the scale of x [8, 64] has 3 elements; expected 1, or 8",
    "TypeError: gemm_reduce_scatter_scaled: the scale of x is torch.float16",
    "ValueError: gemm_all_reduce: no kernel of ours can serve this call (fused: the GEMM kernels multiply bfloat16",
    "launched []",
    "ValueError: gemm_all_reduce: a CUDA graph is being captured and group",
    "launched []",
    "ValueError: gemm_all_reduce: no kernel of ours can serve this call (fused: the ranks are on 2 hosts",
)


def test_mistakes_on_cuda_tensors_are_refused_before_any_launch() -> None:
    """Catches a check behind the first signal, and one that only some ranks make."""
    first, second = run_distributed(2, mistakes)
    assert first == second
    for text, words in zip(first, WORDS, strict=True):
        assert text.startswith(words), text


def large(rank: int, world_size: int) -> dict[str, tuple[str, str]]:
    """Tensors of 2^31 elements and more: decisions, without the memory."""
    name = interlace.resolve(None).name
    place, found = deciding.place_of(name), {}
    with gpus(name):
        for what, rows, width in (
            ("many elements", 1 << 17, 1 << 15),
            ("long dim", 64, 1 << 31),
            ("many rows", 1 << 20, 4096),
        ):
            decision = deciding.decide("gemm_all_reduce", x(rows, 64), place, rows=rows, width=width)
            found[what] = decision.algorithm, decision.why_not("fused")
        with interlace.backend("reference"):
            decision = deciding.decide("gemm_all_reduce", x(64, 64), place, rows=64, width=64)
            found["reference"] = decision.algorithm, decision.reason
    dist.barrier()
    return found


def test_cuda_tensors_of_two_to_the_31_elements_are_fused_or_served_otherwise() -> None:
    """Catches coordinates that wrap: the kernels count elements in 64 bits, a single dim in 32."""
    for found in run_distributed(2, large):
        assert found["many elements"] == ("fused", "")
        assert found["long dim"][0] == "baseline" and "2^31" in found["long dim"][1]
        assert found["many rows"][0] == "decomposed" and "262144 rows" in found["many rows"][1]
        assert found["reference"] == ("baseline", 'interlace.backend("baseline")')


def reported(rank: int, world_size: int) -> list[tuple[bool, str]]:
    """The rows of interlace.report before and after the group has agreed on its GPUs."""
    info = interlace.resolve(None)
    cuda = torch.device("cuda")
    rows = [path_of(info, "gemm_all_reduce", torch.bfloat16, cuda)]
    with gpus(info.name):
        rows.append(path_of(info, "gemm_all_reduce", torch.bfloat16, cuda))
        rows.append(path_of(info, "gemm_all_reduce", torch.float64, cuda))
    return rows


def test_the_report_tells_what_cuda_calls_will_take() -> None:
    """Catches a report that calls fp64 fused, or that sets up a group to answer."""
    for before, bfloat16, float64 in run_distributed(2, reported):
        assert before == (True, "chosen at the call (cuda)")
        assert bfloat16 == (True, "one_shot (few rows), fused (many)")
        assert not float64[0]


def rehearsed(rank: int, world_size: int) -> list[str]:
    return check_public(torch.device("cpu"))


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_checks_of_public_functions_on_gpus_pass_on_cpu_tensors(world_size: int) -> None:
    """A rehearsal of what runs where there are several GPUs: the checks are right, and take every way there is here."""
    for algorithms in run_distributed(world_size, rehearsed):
        assert "decomposed" in algorithms and "reference" in algorithms


def agreed_state(rank: int, world_size: int) -> list[Any]:
    """The first call of a group: ranks that see GPUs of different size, and a tuned table on rank 1 alone."""
    info = interlace.resolve(None)
    hardware = dataclasses.replace(KNOWN["NVIDIA H200"], multiprocessors=132 - rank)
    table = heuristics.load()
    if rank == 1:
        table = heuristics.Table({"*": dataclasses.replace(table.crossovers["*"], one_shot_bytes=7)}, {})
    used = [state.is_used(info.name)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(state, "describe", lambda on: hardware)
        patched.setattr(heuristics, "load", lambda: table)
        memory = types.SimpleNamespace(unavailable=lambda *a: "", multicast=lambda *a: True)
        patched.setattr(state, "device", memory)
        patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        found = state.state_of("gemm_all_reduce", info.name, torch.device("cuda", 0))
        again = state.state_of("gemm_all_reduce", info.name, torch.device("cuda", 0)) is found
    used.append(state.is_used(info.name))
    interlace.destroy(None)
    used.append(state.is_used(info.name))
    return [found.table.digest, found.hardware.multiprocessors, found.hardware.multicast, again, used]


def test_ranks_agree_on_gpus_and_table_at_the_first_call_on_cuda_tensors() -> None:
    """Catches ranks that decide by what they alone see, and a state that outlives its group."""
    first, second = run_distributed(2, agreed_state)
    assert first == second == [heuristics.load().digest, 131, True, True, [False, True, False]]
