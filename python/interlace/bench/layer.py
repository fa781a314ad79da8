"""One layer's MLP or attention block split over the ranks: a forward pass, and a step of training.

forward: frozen weights, packed for the tile engine; baseline: F.linear and torch.distributed's all-reduce on the same
shards. train: output and all gradients, weights as in training; baseline: torch's parallelize_module. compute: the
same engine without communication (train: a whole block as wide as the first rank's part). collective: the block's
all-reduces alone, on the symmetric heap. x unsplit: the whole block in one process with the cores of all ranks / ours.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import interlace
from interlace import functional

from .decoders import (
    SIZES,
    Sizes,
    build,
    clone,
    dtype_name,
    gradients_squared,
    narrowed,
    on_one,
    sizes_of,
    split_by_interlace,
    split_by_torch,
)
from .output import Column
from .row import Report
from .session import Session, size_of
from .shapes import architecture_of, dtypes_of, rows_of
from .split_paths import SplitPath, split_paths
from .steps import README_AGAINST, README_STEP, against, readme_of, step
from .verdict import relative_error

__all__ = ["COLUMNS", "DEVICES", "LayerCase", "cases", "readme", "run"]

DEVICES = ("cpu",)
PARTS = ("mlp", "attention")
FORWARD = {"quick": (1, 128), "small": (1, 16, 128), "full": (1, 16, 128, 512)}
TRAIN = {"quick": (128,), "small": (128,), "full": (128, 512)}
BLOCK = {"mlp": "mlp", "attention": "self_attn"}

COLUMNS = [
    Column("block", "op", width=9),
    Column("of", "case", width=15),
    Column("tokens", "tokens", "{}", 6),
    Column("dtype", "dtype", width=8),
    *step("{:.1f}"),
    *against("{:.1f}"),
]


README = [
    Column("block", "op"),
    Column("of", "case"),
    *README_STEP,
    *README_AGAINST,
]


@dataclass(frozen=True)
class LayerCase:
    """A block of one layer, in one dtype, with so many tokens; `train` adds the backward pass."""

    part: str
    sizes: Sizes
    train: bool
    tokens: int
    dtype: torch.dtype
    ways: int

    @property
    def name(self) -> str:
        """For the progress bar."""
        return f"{self.part} of {self.sizes.name}, {self.phase}, {self.tokens} tokens"

    @property
    def phase(self) -> str:
        return "train" if self.train else "forward"

    @property
    def memory_bytes(self) -> int:
        """Whole weights in dtype and in fp32, shards plain, packed, in training and torch's; activations."""
        whole = self.sizes.parameters * (self.dtype.itemsize + 4)
        shards = 6 * self.sizes.parameters * self.dtype.itemsize // self.ways
        wide = max(self.sizes.intermediate, self.sizes.heads * self.sizes.head_dim)
        return whole + shards + 40 * self.tokens * (self.sizes.hidden + wide // self.ways)

    @property
    def flops(self) -> int:
        """Of one call on a rank; a backward pass is two forward ones."""
        if self.part == "mlp":
            forward = 2 * self.tokens * self.sizes.mlp_parameters
        else:
            forward = 2 * self.tokens * self.sizes.attention_parameters + self.sizes.attention_flops(
                self.tokens
            )
        return (3 if self.train else 1) * forward // self.ways

    def identity(self) -> dict[str, Any]:
        """Fields of Row."""
        return {
            "op": self.part, "case": f"{self.sizes.name} {self.phase}", "tokens": self.tokens,
            "heads": self.sizes.heads if self.part == "attention" else None, "dtype": dtype_name(self.dtype),
        }  # fmt: skip


def cases(settings: Mapping[str, Any], world_size: int) -> list[LayerCase]:
    """Both blocks of every size, both phases. ValueError for an unknown set, or layers of another kind."""
    size = size_of(settings)
    names = tuple(settings.get("shapes") or (("small",) if size != "full" else ("small", "wide")))
    chosen = [
        SIZES[name] if name in SIZES else sizes_of(name, architecture_of(name, tuple(SIZES)))
        for name in names
    ]
    given = rows_of(settings) if settings.get("rows") else None
    work = [(False, tokens) for tokens in given or FORWARD[size]]
    work += [(True, tokens) for tokens in given or TRAIN[size]]
    dtypes = dtypes_of(settings)[: 1 if size == "quick" else None]
    return [
        LayerCase(part, sizes, train, tokens, dtype, world_size)
        for dtype, sizes in itertools.product(dtypes, chosen)
        for part, (train, tokens) in itertools.product(PARTS, work)
    ]


class Block:
    """One block out of a model: its modules, its rotary embedding, called on x [1, S, H]."""

    def __init__(self, model: nn.Module, part: str) -> None:
        inner: Any = model.model
        self.part, self.model = part, model
        self.module: nn.Module = getattr(inner.layers[0], BLOCK[part])
        self.rotary = inner.rotary_emb

    def __call__(self, x: Tensor) -> Tensor:
        if self.part == "mlp":
            out: Tensor = self.module(x)
            return out
        positions = torch.arange(x.shape[1]).unsqueeze(0)
        out, _ = self.module(x, position_embeddings=self.rotary(x, positions), attention_mask=None)
        return out

    def step(self, x: Tensor, grad: Tensor) -> Tensor:
        """Forward and backward: the gradient of x; those of the weights are left where they belong."""
        self.module.zero_grad(set_to_none=True)
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            self(leaf).backward(grad)
        assert leaf.grad is not None
        return leaf.grad

    def weight_gradients(self, *, ours: bool) -> Tensor:
        """Root of the sum of squares of the gradient of every weight, over all ranks. Collective where it is split."""
        return torch.stack([value.sqrt() for value in gradients_squared(self.module, ours=ours).values()])


@dataclass
class Splits:
    """The layer whole and split in every way, made for one size and dtype; what training needs is made when asked."""

    session: Session
    sizes: Sizes
    dtype: torch.dtype
    whole: nn.Module = field(init=False)
    exact: nn.Module = field(init=False)
    paths: dict[str, SplitPath] = field(init=False)
    by_torch: nn.Module = field(init=False)
    _trained: dict[str, nn.Module] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.whole = build(self.sizes, self.dtype).eval().requires_grad_(False)
        self.exact = self.whole if self.dtype is torch.float32 else clone(self.whole, trained=False).float()
        split = split_by_interlace(clone(self.whole, trained=False))
        self.paths = {path.name: path for path in split_paths(split)}
        self.by_torch = split_by_torch(clone(self.whole, trained=False))

    def trained(self) -> dict[str, nn.Module]:
        """Models with gradients: whole, in fp32, narrow, and split by interlace and by torch."""
        if not self._trained:
            self._trained = {
                "whole": clone(self.whole, trained=True),
                "exact": clone(self.exact, trained=True),
                "narrow": narrowed(self.sizes, self.session.world_size, self.dtype).train(),
                "interlace": split_by_interlace(clone(self.whole, trained=True)),
                "torch": split_by_torch(clone(self.whole, trained=True)),
            }
        return self._trained


def one(session: Session, case: LayerCase, splits: Splits) -> None:
    """Check and time one block."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, case.tokens, case.sizes.hidden, generator=generator).to(case.dtype)
    variants = (
        trained_variants(session, case, splits, x)
        if case.train
        else frozen_variants(session, case, splits, x)
    )
    path = interlace.last_path()
    session.record(
        variants,
        flops=case.flops,
        algorithm=path.algorithm,
        reason=path.reason,
        baseline="parallelize_module" if case.train else f"F.linear + {session.backend}",
        extra={"phase": case.phase},
        **case.identity(),
    )


def frozen_variants(
    session: Session, case: LayerCase, splits: Splits, x: Tensor
) -> dict[str, Callable[[], object]]:
    """A forward pass without gradients."""
    whole, by_torch = Block(splits.whole, case.part), Block(splits.by_torch, case.part)
    want = Block(splits.exact, case.part)(x.float())
    # roundings between the products: the unsplit block in this dtype says what they cost
    limit = 2 * relative_error(whole(x), want)
    found = {
        name: (Block(path.model, case.part), Block(path.compute_only, case.part))
        for name, path in splits.paths.items()
    }
    for name, got in (
        ("torch", by_torch(x)),
        ("baseline", found["gloo"][0](x)),
        ("fused", found["interlace"][0](x)),
    ):
        session.check(f"{case.name}, {case.dtype} {name}", got, want, limit)
    ours, alone = found["interlace"]
    theirs, their_compute = found["gloo"]
    return {
        "fused": lambda: ours(x),
        "baseline": lambda: theirs(x),
        "compute": lambda: alone(x),
        "linear": lambda: their_compute(x),
        "collective": sums(session, x, 1),
        "peer:parallelize_module": lambda: by_torch(x),
        "unsplit": on_one(session.placement, lambda: whole(x)),
    }


def trained_variants(
    session: Session, case: LayerCase, splits: Splits, x: Tensor
) -> dict[str, Callable[[], object]]:
    """Output and gradients."""
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(x.dtype)
    blocks = {name: Block(model, case.part) for name, model in splits.trained().items()}
    exact, whole = blocks["exact"], blocks["whole"]
    want, norm = exact.step(x.float(), grad.float()), exact.weight_gradients(ours=False)
    limit = 2 * relative_error(whole.step(x, grad), want)
    # a norm of many roundings: they average out, so it is nearer than the worst value
    for name in ("torch", "interlace"):
        got = blocks[name].step(x, grad)
        session.check(f"{case.name}, {case.dtype} {name} grad_x", got, want, limit)
        session.check(
            f"{case.name}, {case.dtype} {name} grad_weight",
            blocks[name].weight_gradients(ours=name == "interlace"),
            norm,
            max(limit, 1e-5),
        )
    return {
        "fused": lambda: blocks["interlace"].step(x, grad),
        "baseline": lambda: blocks["torch"].step(x, grad),
        "compute": lambda: blocks["narrow"].step(x, grad),
        "collective": sums(session, x, 2),
        "unsplit": on_one(session.placement, lambda: whole.step(x, grad)),
    }


def sums(session: Session, x: Tensor, count: int) -> Callable[[], object]:
    """`count` all-reduces of the size of x on the symmetric heap, one after the other."""
    held, group = torch.zeros_like(x), session.group.name

    def run() -> object:
        out = held
        for _ in range(count):
            out = functional.all_reduce(held, group=group)
        return out

    return run


def readme(report: Report) -> str:
    """A line per block, phase and size."""
    return readme_of(report, README)


def run(settings: Mapping[str, object]) -> int:
    """On every rank."""
    session = Session("layer", COLUMNS, settings)
    held: dict[tuple[Sizes, torch.dtype], Splits] = {}

    def measured(case: LayerCase) -> None:
        key = (case.sizes, case.dtype)
        if key not in held:
            held.clear()  # the weights of one size and dtype at a time
            held[key] = Splits(session, *key)
        one(session, case, held[key])

    return session.run(cases(settings, session.world_size), measured)
