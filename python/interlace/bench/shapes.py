"""Named sets of shapes: the products of known models split over 2, 4 or 8 ranks, and small ones for CPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ..planner.architecture import Architecture, config_names, read_architecture
from ..reference import chunk_range
from .session import size_of

__all__ = [
    "DECODE",
    "MODELS",
    "OPS",
    "PREFILL",
    "Product",
    "architecture_of",
    "dtypes_of",
    "products_of",
    "rows_of",
    "sets",
]

MODELS = {
    "llama1b": "llama-3.2-1b",
    "llama8b": "llama-3.1-8b",
    "llama70b": "llama-3.1-70b",
    "llama405b": "llama-3.1-405b",
    "qwen": "qwen2.5-72b",
    "deepseek": "deepseek-v3",
    "mixtral": "mixtral-8x7b",
}
DECODE = (1, 2, 4, 8, 16, 32, 64)
PREFILL = tuple(128 << i for i in range(9))  # to 32768
OPS = ("all_gather_gemm", "gemm_all_reduce", "gemm_reduce_scatter")

# (M, N on a rank, K on a rank): hidden 1024 and 4096 split over two ranks, what a CPU does in milliseconds
CPU = {
    "gemm_all_reduce": (
        (1, 1024, 512),
        (16, 1024, 512),
        (64, 1024, 512),
        (128, 1024, 512),
        (512, 1024, 512),
        (2048, 1024, 512),
        (2048, 1024, 1408),
        (1, 4096, 2048),
        (16, 4096, 2048),
        (512, 4096, 2048),
    ),
    "gemm_reduce_scatter": ((128, 1024, 512), (512, 1024, 512), (2048, 1024, 512), (512, 4096, 2048)),
    "all_gather_gemm": ((512, 512, 1024), (2048, 512, 1024), (512, 1408, 1024), (512, 2048, 4096)),
}
QUICK = {
    "gemm_all_reduce": ((1, 1024, 512), (128, 1024, 512)),
    "gemm_reduce_scatter": ((128, 1024, 512),),
    "all_gather_gemm": ((512, 512, 1024),),
}
HEAD = {
    "all_gather_gemm": ("qkv", "gate_up"),
    "gemm_all_reduce": ("o", "down"),
    "gemm_reduce_scatter": ("o", "down"),
}


@dataclass(frozen=True)
class Product:
    """One of the three ops on a rank: x [M, K] @ w [N, K].t(), with what is gathered or summed around it."""

    op: str
    case: str
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        """Of one call on a rank."""
        return 2 * self.m * self.n * self.k


def sets() -> dict[str, str]:
    """Names of sets and what they are."""
    return {"cpu": "hidden 1024 and 4096 over two ranks", "quick": "a few of them", **MODELS}


def dtypes_of(settings: Mapping[str, Any]) -> list[torch.dtype]:
    """The dtypes asked for."""
    return [getattr(torch, str(name)) for name in settings["dtype"]]


def rows_of(settings: Mapping[str, Any]) -> tuple[int, ...]:
    """M of a model's set: --rows, or decode and prefill as --phase says. ValueError for what is no number."""
    given = settings.get("rows")
    if given:
        try:
            rows = tuple(int(text) for text in str(given).split(","))
        except ValueError:
            rows = ()
        if not rows or min(rows) < 1:
            raise ValueError(f"bench: --rows {given}; expected positive numbers like 1,16,128")
        return rows
    phase = settings.get("phase", "both")
    decode, prefill = (DECODE, PREFILL) if size_of(settings) == "full" else (DECODE[::3], PREFILL[:3:2])
    return (*(decode if phase != "prefill" else ()), *(prefill if phase != "decode" else ()))


def products_of(settings: Mapping[str, Any], world_size: int) -> list[Product]:
    """All products of the sets named by --shapes, or the CPU's set of this --size.

    ValueError for an unknown set, with the names of all.
    """
    names: Sequence[str] = tuple(
        settings.get("shapes") or (("quick" if size_of(settings) == "quick" else "cpu"),)
    )
    found: list[Product] = []
    for name in names:
        if name in ("cpu", "quick"):
            found += _of_table(name, settings, world_size)
        else:
            found += _of_model(name, int(settings.get("tp") or world_size), rows_of(settings))
    return found


def _of_table(name: str, settings: Mapping[str, Any], world_size: int) -> list[Product]:
    """The products of "cpu" or "quick", whose N and K are those of two ranks. ValueError for --tp."""
    if settings.get("tp"):
        raise ValueError(
            f"bench: --tp {settings['tp']} splits the matrices of a model, and the sizes of the set {name!r} are "
            "fixed; add --shapes llama8b, or leave --tp out"
        )
    table = CPU if name == "cpu" else QUICK
    found = [Product(op, name, *shape) for op, shapes in table.items() for shape in shapes]
    if settings.get("rows"):
        kinds = dict.fromkeys((product.op, product.n, product.k) for product in found)
        rows = rows_of(settings)
        return [
            Product(op, name, m, n, k)
            for op, n, k in kinds
            for m in rows
            if op != "gemm_reduce_scatter" or m >= world_size
        ]
    phase = settings.get("phase", "both")
    return [p for p in found if phase == "both" or (p.m <= DECODE[-1]) == (phase == "decode")]


def architecture_of(name: str, beside: Sequence[str] = ("cpu", "quick")) -> Architecture:
    """The model behind a set's name. ValueError with the names of all sets; `beside`: those that are no models."""
    model = MODELS.get(name, name)
    if model not in config_names():
        raise ValueError(
            f"bench: no set of shapes {name!r}; expected one of {', '.join((*beside, *MODELS))}, or a model that "
            f"`interlace plan` knows ({', '.join(config_names()[:3])}, ..)"
        )
    return _read(model)


@lru_cache(maxsize=16)
def _read(model: str) -> Architecture:
    return read_architecture(model)


def widths(a: Architecture, ways: int) -> dict[str, tuple[int, int]]:
    """(N, K) on the first rank of the four products of a layer; uneven sizes are cut as the layers cut them.

    Heads are whole; where there are fewer key/value heads than ranks a rank holds one.
    """
    heads = _first(a.heads, ways)
    kv = max(1, _first(a.kv_heads, ways))
    moe = a.moe
    inner = _first(moe.intermediate if moe else a.intermediate, ways)
    if a.latent is not None:
        # queries from their low rank; keys and values of a head grow out of the latent, which every rank has
        depth = a.latent.query_rank or a.hidden
        qkv = (heads * (a.latent.nope_dim + a.latent.rope_dim), depth)
        out = (a.hidden, heads * a.latent.value_dim)
    else:
        qkv = ((heads + 2 * kv) * a.head_dim, a.hidden)
        out = (a.hidden, heads * a.head_dim)
    return {"qkv": qkv, "o": out, "gate_up": (2 * inner, a.hidden), "down": (a.hidden, inner)}


def _first(size: int, ways: int) -> int:
    begin, end = chunk_range(size, ways, 0)
    return end - begin


def _of_model(name: str, ways: int, rows: Sequence[int]) -> list[Product]:
    sizes = widths(architecture_of(name), ways)
    return [
        Product(op, f"{name} {part} tp{ways}", m, *sizes[part])
        for op in OPS
        for part in HEAD[op]
        for m in rows
        if op != "gemm_reduce_scatter"
        or m >= ways  # decode is summed whole: a rank would own less than a row
    ]
