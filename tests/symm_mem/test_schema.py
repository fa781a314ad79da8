"""Our kernels under torch's symm_mem schemas: values, strides, call forms, refusals, and taking them away again."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from interlace.paths import last_path
from interlace.symm_mem_ops import provide_symm_mem_ops
from tests import oracle
from tests.distributed import run_distributed

LAYOUTS = (oracle.contiguous, oracle.transposed)


def _group() -> str:
    return dist.group.WORLD.group_name


def _all(shape: tuple[int, ...], world_size: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """One tensor for each rank, known to all, of integers whose products and sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return [oracle.integers(shape, dtype, generator) for _ in range(world_size)]


def _check(what: str, found: Tensor, expected: Tensor, fake: Tensor) -> None:
    """Exact values; the strides that torch's Meta kernel promises, which is what compiled code asserts."""
    oracle.check_equal(what, found, expected)
    assert found.stride() == fake.stride(), f"{what}: strides {found.stride()}, promised {fake.stride()}"


def _fake(call: object, *args: object, **kwargs: object) -> object:
    mode = FakeTensorMode()

    def convert(value: object) -> object:
        if isinstance(value, Tensor):
            return mode.from_tensor(value)
        return [convert(v) for v in value] if isinstance(value, list) else value

    with mode:
        return call(*map(convert, args), **kwargs)


def _gathers(rank: int, world_size: int) -> None:
    op = torch.ops.symm_mem.fused_all_gather_matmul
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((3, 8), (2, 3, 8), (2, 1, 3, 8)):
            for dim in range(len(shape)):
                parts = _all(shape, world_size, dtype, 1)
                whole = torch.cat(parts, dim)
                bs = [_all((whole.shape[-1], n), 1, dtype, n)[0] for n in (5, 16)]
                bs[1] = bs[1].t().contiguous().t()  # as a weight [N, K] comes in
                for layout in LAYOUTS if dtype is torch.float32 else LAYOUTS[:1]:
                    args = (layout(parts[rank]), bs, dim, _group())
                    for keep in (True, False):
                        gathered, outs = op(*args, return_A=keep)
                        fake_gathered, fake_outs = _fake(op, *args, return_A=keep)
                        what = f"{dtype}, {shape}, dim {dim}, {layout.__name__}"
                        for out, fake, b in zip(outs, fake_outs, bs, strict=True):
                            _check(what, out, (whole.double() @ b.double()).to(dtype), fake)
                        if keep:
                            _check(f"{what}, A", gathered, whole, fake_gathered)
                        else:
                            assert gathered is None


def _scatters(rank: int, world_size: int) -> None:
    op = torch.ops.symm_mem.fused_matmul_reduce_scatter
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((world_size * 2, 8), (2, world_size * 3, 8), (world_size, 1, world_size, 8)):
            for dim in range(len(shape)):
                parts, bs = _all(shape, world_size, dtype, 2), _all((8, world_size * 5), world_size, dtype, 3)
                total = sum(a.double() @ b.double() for a, b in zip(parts, bs, strict=True))
                if total.shape[dim] % world_size:
                    continue
                for layout in LAYOUTS if dtype is torch.float32 else LAYOUTS[:1]:
                    for reduce_op, scale in (("sum", 1), ("avg", world_size)):
                        args = (layout(parts[rank]), bs[rank], reduce_op, dim, _group())
                        expected = total.chunk(world_size, dim)[rank].to(dtype) / scale
                        _check(
                            f"{dtype}, {shape}, dim {dim}, {reduce_op}", op(*args), expected, _fake(op, *args)
                        )


def _schemas(rank: int, world_size: int) -> None:
    with provide_symm_mem_ops():
        _gathers(rank, world_size)
        _scatters(rank, world_size)
        assert last_path().fused, last_path()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_values_and_strides_are_those_of_the_schema(world_size: int) -> None:
    """Every dim, 2-D to 4-D, several Bs, non-contiguous A, with and without the gathered A; results compare with ==."""
    run_distributed(world_size, _schemas)


def _rounding(rank: int, world_size: int) -> None:
    generator = torch.Generator().manual_seed(4)
    parts = [oracle.normals((64, 96), torch.bfloat16, generator) for _ in range(world_size)]
    bs = [oracle.normals((96, 48), torch.bfloat16, generator) for _ in range(world_size)]
    with provide_symm_mem_ops(("cpu",)):
        out = torch.ops.symm_mem.fused_matmul_reduce_scatter(parts[rank], bs[rank], "sum", 0, _group())
    a, b = torch.cat(parts, 1), torch.cat(bs, 0)
    exact, same = ((a.double() @ b.double()), a @ b)
    rows = slice(rank * 16, rank * 16 + 16)
    oracle.check_close("bf16", out, exact[rows], same[rows])


def test_bf16_sums_cross_ranks_in_fp32() -> None:
    """Four partial sums rounded to bf16 at every addition would err twice as much as the unsplit product."""
    run_distributed(4, _rounding)


def _call_forms(rank: int, world_size: int) -> None:
    x, w = torch.randn(4, 8), torch.randn(6, 8)
    group = dist.group.WORLD
    with provide_symm_mem_ops():
        one = torch.ops.symm_mem.fused_all_gather_matmul(x, [w.t()], gather_dim=0, group_name=_group())
        two = torch.ops.symm_mem.fused_all_gather_matmul.default(
            x, [w.t()], 0, group.group_name, return_A=True
        )
        three = torch.ops.symm_mem.fused_all_gather_matmul(A=x, Bs=[w.t()], gather_dim=0, group_name=_group())
        assert torch.equal(one[0], two[0]) and torch.equal(one[1][0], two[1][0])
        assert torch.equal(three[1][0], two[1][0])
        y = torch.randn(4, 8)
        one = torch.ops.symm_mem.fused_matmul_reduce_scatter(
            y, w.t(), "sum", scatter_dim=0, group_name=_group()
        )
        two = torch.ops.symm_mem.fused_matmul_reduce_scatter.default(y, w.t(), "sum", 0, _group())
        three = torch.ops.symm_mem.fused_matmul_reduce_scatter(
            A=y, B=w.t(), reduce_op="sum", scatter_dim=0, group_name=_group()
        )
        assert torch.equal(one, two) and torch.equal(one, three)


def test_positional_and_keyword_calls_are_one() -> None:
    """Compilers emit positional arguments, serving engines name scatter_dim and group_name."""
    run_distributed(2, _call_forms)


def _refusals(rank: int, world_size: int) -> None:
    ag, rs = torch.ops.symm_mem.fused_all_gather_matmul, torch.ops.symm_mem.fused_matmul_reduce_scatter
    x, b = torch.randn(4, 8), torch.randn(8, 6)
    with provide_symm_mem_ops():
        for call, error, text in (
            (lambda: ag(x[0], [b], 0, _group()), ValueError, r"A has shape \[8\]"),
            (lambda: ag(x, [b], 2, _group()), ValueError, "gather_dim=2; expected 0 to 1"),
            (lambda: ag(x, [b[0]], 0, _group()), ValueError, "expected a matrix"),
            (lambda: ag(x, [b], 1, _group()), ValueError, r"needs B \[16, N\]"),
            (lambda: ag(x, [torch.randn(7, 6)], 0, _group()), ValueError, r"needs a weight \[N, 8\]"),
            (lambda: ag(x, [b.double()], 0, _group()), TypeError, "cast one of them"),
            (lambda: rs(x, b, "max", 0, _group()), ValueError, "reduce_op='max'"),
            (lambda: rs(x[:3], b, "sum", 0, _group()), ValueError, "3 of dim 0 do not divide by the 2 ranks"),
            (
                lambda: rs(x, b[:, :5], "sum", 1, _group()),
                ValueError,
                "5 of dim 1 do not divide by the 2 ranks",
            ),
        ):
            with pytest.raises(error, match=text):
                call()
        # all ranks refused: the next good call works
        assert ag(x, [b], 0, _group())[1][0].shape == (8, 6)
        with pytest.raises((ValueError, RuntimeError), match="all_gather_gemm"):
            ag(x[: 4 - rank], [b], 0, _group())


def test_what_the_schema_does_not_know_is_refused_on_every_rank() -> None:
    run_distributed(2, _refusals)


def _reversible(rank: int, world_size: int) -> None:
    x, b = torch.randn(4, 8), torch.randn(8, 6)

    def call() -> Tensor:
        return torch.ops.symm_mem.fused_all_gather_matmul(x, [b], 0, _group())[1][0]

    def cuda_kernel() -> str:
        table = torch._C._dispatch_dump_table("symm_mem::fused_all_gather_matmul")
        return next(line for line in table.splitlines() if line.startswith("CUDA:"))

    with pytest.raises(NotImplementedError):
        call()
    stock = cuda_kernel()
    handle = provide_symm_mem_ops()
    assert cuda_kernel() != stock
    out = call()
    with pytest.raises(ValueError, match="provided already"):
        provide_symm_mem_ops()
    handle.close()
    handle.close()
    assert handle.closed and cuda_kernel() == stock
    with pytest.raises(NotImplementedError):
        call()
    provide_symm_mem_ops(("cpu",))  # nobody keeps the handle
    with pytest.raises(ValueError, match="provided already"), provide_symm_mem_ops():
        pass
    assert torch.equal(call(), out)
    from interlace import symm_mem_ops

    symm_mem_ops._provided[0].close()
    with pytest.raises(ValueError, match=r"devices=\('tpu',\)"):
        provide_symm_mem_ops(("tpu",))


def test_the_kernels_come_and_go() -> None:
    run_distributed(2, _reversible)
