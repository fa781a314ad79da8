"""Run by test_cuda_host.py in a process of its own: `cuda_host_calls.py LIBRARY`.

Every op of the library is called rightly and wrongly with CPU tensors. Whether tensors lie on a GPU is checked last, so
a right call gets as far as that, and a wrong one is refused for its own reason.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

torch.ops.load_library(sys.argv[1])
OPS = torch.ops.interlace
CPU = "got a CPU tensor"
Change = dict[str, Any]

refused: set[str] = set()  # ops that a bad call was made to
reached: set[str] = set()  # ops whose good call got as far as the device


def refuses(text: str, name: str, call: Callable[[], object]) -> None:
    """The call raises an error that says `text`."""
    try:
        call()
    except RuntimeError as error:
        assert text in str(error), f"{name}: expected {text!r}, got: {error}"
    else:
        raise AssertionError(f"{name}: accepted: {text}")
    (reached if text == CPU else refused).add(name)


def tail(
    world_size: int = 2, rank: int = 0, half: int = 1 << 20, timeout: float = 1.0, **change: Any
) -> list[Any]:
    """The group's arguments: addresses that are never touched."""
    segments = change.get("segments", [128 * (r + 1) for r in range(world_size)])
    return [segments, change.get("pages", [64]), change.get("multicast", 0), half, rank, timeout]


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


def check_group() -> None:
    """Sizes, and what is wrong with a group."""
    assert OPS._device_segment_bytes(1024) == OPS._device_segment_bytes(0) + 2048
    nbytes, state = OPS._device_page_layout()
    words = OPS._device_epoch_words()
    assert words[:2] == [0, 512], words
    assert all(
        4 * (b + n) <= OPS._device_segment_bytes(0) for b, n in zip(words[::2], words[1::2], strict=True)
    )
    page = torch.zeros(nbytes + 64, dtype=torch.uint8)
    address = -(-page.data_ptr() // 64) * 64
    assert OPS._device_failure(address) == (0, "no failure")
    OPS._device_request_abort(address)
    assert page.sum() == 1
    words = page[address - page.data_ptr() :].view(torch.int32)
    words[state // 4 : state // 4 + 8] = torch.tensor([1, 3, 2, 1, 0, 7, 6, 5], dtype=torch.int32)
    text = "gemm_all_reduce, rank 2: no answer from rank 1, chunk 5: wanted epoch 7, seen epoch 6"
    assert OPS._device_failure(address) == (1, text), OPS._device_failure(address)
    refuses("is not aligned to 64", "_device_failure", lambda: OPS._device_failure(3))
    refuses("is not aligned to 64", "_device_request_abort", lambda: OPS._device_request_abort(0))

    refuses("got 9 addresses", "_device_read_addresses", lambda: OPS._device_read_addresses(128, 9, 0))

    def barrier(text: str, ranks: int = 1, **change: Any) -> None:
        refuses(text, "_device_barrier", lambda: OPS._device_barrier(*tail(**change), ranks, 0))

    barrier("got 9 segments; expected one per rank, 1 to 8", world_size=9)
    barrier("got 0 segments", world_size=0)
    barrier("rank 2 is not in a group of 2", rank=2)
    barrier("timeout is 0 s; expected more than 0", timeout=0.0)
    barrier("half_bytes is 24; expected a multiple of 16", half=24)
    barrier("the segment of rank 1 at 200 is not aligned to 128", segments=[128, 200])
    barrier("the host page of rank 0 at 60 is not pinned memory", pages=[60])
    barrier("got 3 host pages; expected 1, or one for each of 2", pages=[64, 128, 192])
    barrier("multicast address 100 is not aligned", multicast=100)
    barrier("got ranks 0 to 1 of 2 with 1 host pages", ranks=2)
    refuses("rank 5 is not in a group", "_device_abort", lambda: OPS._device_abort(*tail(rank=5), 0))


GEMM: Change = {
    "xs": [bf16(4, 64)],
    "weights": [bf16(8, 64)],
    "biases": [bf16(8)],
    "residual": None,
    "x_scale": None,
    "weight_scales": [],
    "outs": [bf16(4, 8)],
    "summed": False,
    "tile_columns": 128,
    "blocks": 0,
}
FP8 = {
    "xs": [torch.zeros(4, 64).to(torch.float8_e4m3fn)],
    "weights": [torch.zeros(8, 64).to(torch.float8_e4m3fn)],
    "x_scale": torch.ones(1),
    "weight_scales": [torch.ones(1)],
}


def check_gemm() -> None:
    """The plain product: layouts, dtypes, scales, shapes."""

    def gemm(text: str, **change: Any) -> None:
        refuses(text, "_device_gemm", lambda: OPS._device_gemm(*{**GEMM, **change}.values()))

    gemm(CPU)
    gemm(CPU, biases=[None], residual=bf16(4, 8))
    gemm(CPU, weights=[bf16(64, 8).t()])
    gemm(CPU, xs=[bf16(4, 128)[:, :64]])
    gemm(CPU, xs=[bf16(0, 64)], outs=[bf16(0, 8)])
    gemm(CPU, weights=[bf16(8, 64)] * 4, biases=[None] * 4, outs=[bf16(4, 8)] * 4)
    gemm(CPU, xs=[bf16(4, 64), bf16(4, 32)], weights=[bf16(8, 64), bf16(8, 32)], summed=True)
    gemm(CPU, **FP8)
    gemm(CPU, **{**FP8, "x_scale": torch.ones(4), "weight_scales": [torch.ones(8)]})
    gemm("got 5 weights; expected 1 to 4", weights=[bf16(8, 64)] * 5)
    gemm("got 2 x for 1 weights", xs=[bf16(4, 64)] * 2)
    gemm("x is float32; the fused kernels multiply", xs=[torch.zeros(4, 64)])
    gemm("x is Double", xs=[torch.zeros(4, 64).double()])
    gemm("weight is Half; expected bfloat16", weights=[bf16(8, 64).half()])
    gemm("a weight is [8, 32] and x has 64 columns; expected [N, 64]", weights=[bf16(8, 32)])
    gemm("a weight is [8]; expected [N, K]", weights=[bf16(8)])
    gemm("expected 1 for one of them", weights=[bf16(8, 128)[:, ::2]])
    gemm("expected no empty dimension", weights=[bf16(0, 64)], outs=[bf16(4, 0)], biases=[None])
    gemm(
        "stored by rows and some by columns",
        weights=[bf16(8, 64), bf16(64, 8).t()],
        biases=[None] * 2,
        outs=[bf16(4, 8)] * 2,
    )
    gemm("x is [4, 2, 64]; expected 2 dims", xs=[bf16(4, 2, 64)])
    gemm("neighbouring columns 2 elements apart", xs=[bf16(4, 128)[:, ::2]])
    gemm("they overlap", xs=[bf16(64).expand(4, 64)])
    gemm("out is [4, 9]; expected [4, 8]", outs=[bf16(4, 9)])
    gemm("out is Float; expected bfloat16", outs=[torch.zeros(4, 8)])
    gemm("got 2 outs; expected 1", outs=[bf16(4, 8)] * 2)
    gemm("bias is [9]; expected [8]", biases=[bf16(9)])
    gemm("got 2 biases", biases=[None, None])
    gemm("residual is [4, 7]; expected [4, 8]", residual=bf16(4, 7))
    gemm("tile_columns=64; expected 128 or 256", tile_columns=64)
    gemm("a scale for x and for each weight", **{**FP8, "weight_scales": []})
    gemm("expected none", x_scale=torch.ones(1))
    gemm("x_scale is Double; expected float32", **{**FP8, "x_scale": torch.ones(1).double()})
    gemm("x_scale is [3]; expected 1 value", **{**FP8, "x_scale": torch.ones(3)})
    huge = bf16(64).expand(2**31, 64)
    gemm("a dimension of 2^31 or more", weights=[huge])
    gemm("a dimension of 2^31 or more", xs=[huge])


GATHER: Change = {
    "x": bf16(4, 64),
    "weights": [bf16(8, 64)],
    "biases": [None],
    "x_scale": None,
    "weight_scales": [],
    "gathered": bf16(10, 64),
    "outs": [bf16(10, 8)],
    "rows": [4, 6],
}


def check_gather() -> None:
    """all_gather_gemm and the all-gather by copy engines: rows of every rank, room in the halves."""
    need = OPS._device_half_bytes_all_gather_gemm([4, 6], 64, 2)
    assert need >= 256 * 64 * 2
    refuses(
        "got 9 ranks",
        "_device_half_bytes_all_gather_gemm",
        lambda: OPS._device_half_bytes_all_gather_gemm([1] * 9, 8, 2),
    )

    def gather(text: str, comm_blocks: int = 2, group: Change | None = None, **change: Any) -> None:
        first = {**GATHER, **change}.values()
        refuses(
            text,
            "_device_all_gather_gemm",
            lambda: OPS._device_all_gather_gemm(*first, *tail(**group or {}), 128, 0, comm_blocks),
        )

    gather(CPU)
    gather(CPU, comm_blocks=0)
    gather(CPU, gathered=None)
    gather(CPU, group={"half": need})
    gather(CPU, x=bf16(0, 64), rows=[0, 10])
    gather(CPU, x=bf16(0, 64), rows=[0, 0], outs=[bf16(0, 8)], gathered=None)
    gather(f"{need} bytes of staging do not fit into a half of {need - 16}", group={"half": need - 16})
    gather("got rows [4, 6, 1]; expected one number for each of 2 ranks", rows=[4, 6, 1])
    gather("expected numbers from 0", rows=[4, -6])
    gather("2^31 or more are not served", rows=[4, 2**31 - 1])
    gather("x has 4 rows; expected 5, rows[0] of [5, 5]", rows=[5, 5])
    gather("out is [10, 7]; expected [10, 8]", outs=[bf16(10, 7)])
    gather("gathered is [9, 64]; expected [10, 64]", gathered=bf16(9, 64))
    gather("gathered is Half", gathered=bf16(10, 64).half())
    fp8 = {"x": FP8["xs"][0], "weights": FP8["weights"], "gathered": None}
    gather(CPU, x_scale=torch.ones(1), weight_scales=[torch.ones(1)], **fp8)
    gather("one scale for all of x", 0, x_scale=torch.ones(1), weight_scales=[torch.ones(1)], **fp8)

    def copied(text: str, x: torch.Tensor, out: torch.Tensor, rows: list[int], **change: Any) -> None:
        refuses(
            text,
            "_device_copy_engine_all_gather",
            lambda: OPS._device_copy_engine_all_gather(x, out, rows, *tail(**change)),
        )

    copied(CPU, bf16(4, 5), bf16(10, 5), [4, 6])
    copied("out is [9, 5]; expected [10, 5]", bf16(4, 5), bf16(9, 5), [4, 6])
    copied("do not fit into a half of 16", bf16(4, 5), bf16(10, 5), [4, 6], half=16)


REDUCE: Change = {
    "xs": [bf16(10, 64)],
    "weights": [bf16(8, 64)],
    "bias": bf16(8),
    "residual": None,
    "norm_weight": None,
    "eps": 1e-5,
    "x_scale": None,
    "weight_scales": [],
    "out": bf16(4, 8),
    "normalised": None,
    "rows": [4, 6],
    "float32_wire": False,
    "use_multicast": False,
}


def check_reduce() -> None:
    """gemm_reduce_scatter and gemm_all_reduce: what follows the sum, rows of every rank, room in the halves."""

    def scatter(text: str, group: Change | None = None, **change: Any) -> None:
        first = {**REDUCE, **change}.values()
        refuses(
            text,
            "_device_gemm_reduce_scatter",
            lambda: OPS._device_gemm_reduce_scatter(*first, *tail(**group or {}), 128, 0, 0),
        )

    def everywhere(text: str, group: Change | None = None, **change: Any) -> None:
        first = {**REDUCE, "out": bf16(10, 8), **change}
        del first["rows"]
        refuses(
            text,
            "_device_gemm_all_reduce",
            lambda: OPS._device_gemm_all_reduce(*first.values(), *tail(**group or {}), 128, 0, 4),
        )

    need = OPS._device_half_bytes_gemm_reduce([4, 6], 2, True, 8, 2, False, False)
    wide = OPS._device_half_bytes_gemm_reduce([4, 6], 2, True, 8, 2, True, False)
    assert need == 2 * 6 * 16 + 64
    assert wide == 2 * 6 * 32 == 2 * need - 128
    scatter(CPU, group={"half": need})
    scatter(f"{wide} bytes of staging do not fit", group={"half": need}, float32_wire=True)
    norm = {"normalised": bf16(4, 8), "norm_weight": bf16(8), "residual": bf16(4, 8)}
    scatter(CPU, **norm)
    scatter(CPU, **{**norm, "out": None})
    scatter(CPU, use_multicast=True, group={"multicast": 128})
    scatter("this workspace has none", use_multicast=True)
    scatter("neither out nor normalised", out=None)
    scatter("norm_weight without normalised", norm_weight=bf16(8))
    scatter("norm_weight is [9]", **{**norm, "norm_weight": bf16(9)})
    scatter("eps is -1", **{**norm, "eps": -1.0})
    scatter("residual is [10, 8]; expected [4, 8]", residual=bf16(10, 8))
    scatter("x has 10 rows; expected 11, the sum of rows [5, 6]", rows=[5, 6])
    everywhere(CPU)
    everywhere(CPU, xs=[bf16(10, 64), bf16(10, 16)], weights=[bf16(8, 64), bf16(8, 16)])
    everywhere(CPU, xs=[bf16(0, 64)], out=bf16(0, 8))
    everywhere("out is [4, 8]; expected [10, 8]", out=bf16(4, 8))
    need = OPS._device_half_bytes_gemm_reduce([10], 2, False, 8, 2, False, False)
    everywhere(CPU, group={"half": need})
    everywhere("do not fit", group={"half": need - 128})
    refuses(
        "got 9 ranks",
        "_device_half_bytes_gemm_reduce",
        lambda: OPS._device_half_bytes_gemm_reduce([1], 9, False, 8, 2, False, False),
    )


def check_collectives() -> None:
    """The plain collectives: one dtype, dense, as many blocks as there are words."""
    for name in ("_device_one_shot_all_reduce", "_device_two_shot_all_reduce"):
        op = getattr(OPS, name)

        def reduce(
            text: str, inputs: Any, outs: Any, blocks: int = 4, op: Any = op, name: str = name, **change: Any
        ) -> None:
            refuses(text, name, lambda: op(inputs, outs, *tail(**change), blocks))

        reduce(CPU, [bf16(9)], [bf16(9)])
        reduce(CPU, [bf16(9)] * 2, [bf16(9)] * 2, pages=[64, 128])
        reduce("got no input", [], [])
        reduce("got 2 inputs; expected 1", [bf16(9)] * 2, [bf16(9)] * 2)
        reduce("got 2 outs for 1 inputs", [bf16(9)], [bf16(9)] * 2)
        reduce("the input is Double", [torch.zeros(2).double()], [torch.zeros(2).double()])
        reduce("out is Half", [bf16(9)], [bf16(9).half()])
        reduce("has gaps", [bf16(18)[::2]], [bf16(9)])
        reduce("got tensors of 9 and of 8 elements", [bf16(9)], [bf16(8)])
        reduce("blocks=65; expected 1 to 64", [bf16(9)], [bf16(9)], blocks=65)
        reduce("do not fit into a half of 16", [bf16(99)], [bf16(99)], half=16)
    none = [None] * 3
    for name, rows in (
        ("_device_one_shot_all_reduce_norm", []),
        ("_device_two_shot_all_reduce_norm", []),
        ("_device_reduce_scatter_norm", [[4, 6]]),
    ):
        op, own = getattr(OPS, name), 4 if rows else 10

        def norm(
            text: str, *operands: Any, op: Any = op, name: str = name, rows: Any = rows, **change: Any
        ) -> None:
            refuses(text, name, lambda: op(bf16(10, 8), *operands, *rows, *tail(**change), 4))

        norm(CPU, *none, 1e-5, None, bf16(own, 8))
        norm(CPU, bf16(8), bf16(own, 8), bf16(8), 1e-5, bf16(own, 8), bf16(own, 8))
        norm("neither sums nor out", *none, 1e-5, None, None)
        norm(f"out is [3, 8]; expected [{own}, 8]", *none, 1e-5, None, bf16(3, 8))
        norm("bias is [7]; expected [8]", bf16(7), None, None, 1e-5, None, bf16(own, 8))
        norm("eps is -1", *none, -1.0, None, bf16(own, 8))
        norm("do not fit into a half of 16", *none, 1e-5, None, bf16(own, 8), half=16)
    scatter = OPS._device_reduce_scatter
    refuses(CPU, "_device_reduce_scatter", lambda: scatter(bf16(10, 3, 2), bf16(4, 3, 2), [4, 6], *tail(), 4))
    refuses(
        "expected 10 in all and 4 here",
        "_device_reduce_scatter",
        lambda: scatter(bf16(10, 3), bf16(5, 3), [4, 6], *tail(), 4),
    )
    refuses(
        "equal shapes behind dim 0",
        "_device_reduce_scatter",
        lambda: scatter(bf16(10, 3), bf16(4, 2), [4, 6], *tail(), 4),
    )
    gather = OPS._device_all_gather
    words = torch.zeros(4, 3, dtype=torch.int64)
    refuses(
        CPU, "_device_all_gather", lambda: gather(words, words.new_zeros(10, 3), [4, 6], *tail(), 4, False)
    )
    refuses(
        "has none",
        "_device_all_gather",
        lambda: gather(words, words.new_zeros(10, 3), [4, 6], *tail(), 4, True),
    )
    refuses(
        "elements of 16 bytes",
        "_device_all_gather",
        lambda: gather(words.to(torch.complex128), bf16(1), [4, 6], *tail(), 4),
    )

    def exchange(text: str, sent: list[int], received: list[int], largest: int, **change: Any) -> None:
        refuses(
            text,
            "_device_all_to_all",
            lambda: OPS._device_all_to_all(
                bf16(5, 8), bf16(7, 8), sent, received, largest, *tail(**change), 4
            ),
        )

    exchange(CPU, [2, 3], [2, 5], 5)
    exchange("rows [2, 2] sent", [2, 2], [2, 5], 5)
    exchange("largest_rows=4 is less than a piece", [2, 3], [2, 5], 4)
    exchange("do not fit into a half of 16", [2, 3], [2, 5], 5, half=16)
    assert OPS._device_half_bytes_one_shot(2, 9, 2) == 64
    assert OPS._device_half_bytes_two_shot(1, 9, 2, 2) == 32
    assert OPS._device_half_bytes_slots(3, 8, 2, 4) == 192


for check in (check_group, check_gemm, check_gather, check_reduce, check_collectives):
    check()
sizes = {"_device_segment_bytes", "_device_page_layout", "_device_multiprocessors", "_device_epoch_words"}
sizes |= {f"_device_half_bytes_{name}" for name in ("one_shot", "two_shot", "slots")}
names = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if "::_device_" in name}
assert names - refused - sizes == set(), f"never called wrongly: {names - refused - sizes}"
tensors = {n for n in names if "Tensor" in str(getattr(OPS, n).default._schema)}
assert tensors == reached, f"never called rightly: {tensors - reached}"
print(f"{len(names)} ops: all bad calls refused")
