"""The named sets of shapes, against the published sizes of the models."""

from __future__ import annotations

import pytest

from interlace.bench.shapes import DECODE, OPS, PREFILL, products_of, sets


def shapes(name: str, tp: int, **more: object) -> dict[str, tuple[int, int]]:
    found = products_of({"shapes": (name,), "tp": tp, "rows": "64", **more}, 2)
    return {p.case.split()[1]: (p.n, p.k) for p in found}


def test_products_are_those_of_the_models():
    """Catches N and K swapped, gate without up, key/value heads forgotten."""
    assert shapes("llama8b", 8) == {
        "qkv": ((32 + 2 * 8) // 8 * 128, 4096), "gate_up": (2 * 14336 // 8, 4096),
        "o": (4096, 4096 // 8), "down": (4096, 14336 // 8),
    }  # fmt: skip
    assert shapes("llama70b", 4)["down"] == (8192, 28672 // 4)
    assert shapes("llama405b", 8)["gate_up"] == (2 * 53248 // 8, 16384)
    assert shapes("llama1b", 2)["o"] == (2048, 32 * 64 // 2)
    assert shapes("qwen", 8)["down"] == (8192, 29568 // 8)
    assert shapes("mixtral", 2)["gate_up"] == (14336, 4096)
    assert shapes("deepseek", 8) == {  # latent attention: queries from rank 1536, heads of 128 + 64
        "qkv": (128 // 8 * 192, 1536), "o": (7168, 128 // 8 * 128),
        "gate_up": (2 * 2048 // 8, 7168), "down": (7168, 2048 // 8),
    }  # fmt: skip


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_every_set_has_every_op_in_decode_and_prefill(tp: int):
    """Catches a set that is named and empty; fewer key/value heads than ranks give one each."""
    for name in sets():
        if name in ("cpu", "quick"):
            continue
        found = products_of({"shapes": (name,), "tp": tp}, 2)
        assert {p.op for p in found} == set(OPS)
        assert {p.m for p in found if p.op == "gemm_all_reduce"} == {*DECODE, *PREFILL}
        assert all(p.n > 0 and p.k > 0 for p in found)
    assert DECODE[0] == 1 and DECODE[-1] == 64
    assert PREFILL[0] == 128 and PREFILL[-1] == 32768


def test_small_sizes_are_subsets():
    """Catches a --size small that measures what --size full does not."""
    full = products_of({"shapes": ("llama8b",)}, 2)
    small = products_of({"shapes": ("llama8b",), "size": "small"}, 2)
    assert set(small) < set(full)
    assert {p.op for p in small} == set(OPS)
    quick = products_of({"quick": True}, 2)
    assert 0 < len(quick) < len(products_of({}, 2))


def test_a_name_of_the_planner_is_a_set_and_another_is_refused_with_all_names():
    """Catches a typing mistake that measures something else."""
    assert shapes("smollm2-135m", 3)["qkv"] == ((3 + 2) * 64, 576)
    with pytest.raises(ValueError, match="llama70b, llama405b, qwen, deepseek, mixtral"):
        products_of({"shapes": ("gpt",)}, 2)


def test_options_of_shapes_hold_for_the_sets_of_the_cpu_too():
    """Catches --rows, --phase and --tp that are passed over where no model is named."""
    found = products_of({"quick": True, "rows": "1,48"}, 2)
    assert [(p.op, p.m) for p in found if p.op != "all_gather_gemm"] == [
        ("gemm_all_reduce", 1),
        ("gemm_all_reduce", 48),
        ("gemm_reduce_scatter", 48),
    ]
    assert {p.m for p in products_of({"phase": "decode"}, 2)} == {1, 16, 64}
    assert min(p.m for p in products_of({"phase": "prefill"}, 2)) == 128
    with pytest.raises(ValueError, match="--tp 4 splits the matrices of a model"):
        products_of({"tp": 4}, 2)
