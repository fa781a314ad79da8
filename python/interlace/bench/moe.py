"""Routed experts over the ranks: whole experts behind dispatch and combine, or a part of every expert on every rank.

experts: each rank has tokens of its own and whole experts; a router sends each token to top-k of them by all-to-all
and the results come back the same way. baseline: torch's all_to_all_single. features: all tokens are on all ranks,
which hold a part of the features of every expert (`interlace.parallelize`) and sum by all-reduce; baseline: the same
parts and torch's all-reduce. compute: the same steps and products on the same rows, without communication. collective:
the exchanges (or the sum) alone. imbalance: rows of the busiest rank / mean.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import interlace
from interlace import functional
from interlace.reference import chunk_range

from .decoders import dtype_name
from .layer import sums
from .output import Column
from .row import Report
from .session import Session, size_of
from .shapes import architecture_of, dtypes_of
from .steps import README_AGAINST, README_STEP, against, readme_of, step
from .verdict import relative_error

__all__ = ["COLUMNS", "DEVICES", "ExpertSizes", "MoeCase", "Routed", "cases", "readme", "run"]

DEVICES = ("cpu",)
TOKENS = {"quick": (256,), "small": (64, 512), "full": (16, 128, 512, 2048)}

COLUMNS = [
    Column("split", "op", width=13),
    Column("of", "case", width=26),
    Column("tokens", "tokens", "{}", 6),
    Column("dtype", "dtype", width=8),
    *step("{:.1f}"),
    Column("moved MB", "moved_mb", "{:.2f}", 8),
    Column("imbalance", "imbalance", "{:.2f}"),
    *against("{:.1f}")[:2],  # nobody else splits experts like that
]


README = [
    Column("split", "op"),
    Column("of", "case"),
    *README_STEP,
    Column("moved MB", "moved_mb", "{:.2f}"),
    Column("imbalance", "imbalance", "{:.2f}"),
    *README_AGAINST[:1],
]


@dataclass(frozen=True)
class ExpertSizes:
    """A layer of experts: gate, up and down [intermediate, hidden] each, of which a token meets top_k."""

    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int

    @property
    def expert_parameters(self) -> int:
        return 3 * self.hidden * self.intermediate


SIZES = {
    "small": ExpertSizes("small", 512, 1024, 8, 2),
    "fine": ExpertSizes("fine", 512, 256, 32, 4),
}


@dataclass(frozen=True)
class MoeCase:
    """Experts, or features of every expert, split over the ranks; tokens: of all ranks together."""

    split: str
    sizes: ExpertSizes
    tokens: int
    dtype: torch.dtype
    ways: int

    @property
    def name(self) -> str:
        """For the progress bar."""
        return f"{self.split} of {self.sizes.name}, {self.tokens} tokens, {dtype_name(self.dtype)}"

    @property
    def memory_bytes(self) -> int:
        """All experts in dtype and fp32 for the oracle, two splits; routed rows several times."""
        s = self.sizes
        weights = s.experts * s.expert_parameters * (self.dtype.itemsize * 2 + 4)
        return weights + 8 * self.tokens * s.top_k * (2 * s.hidden + 2 * s.intermediate) * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """Of one call on a rank when the load is even."""
        return 2 * self.tokens * self.sizes.top_k * self.sizes.expert_parameters // self.ways

    def identity(self) -> dict[str, Any]:
        """Fields of Row."""
        s = self.sizes
        case = f"{s.name}, {s.experts} experts, top {s.top_k}"
        return {
            "op": f"moe {self.split}",
            "case": case,
            "tokens": self.tokens,
            "dtype": dtype_name(self.dtype),
        }


def cases(settings: Mapping[str, Any], world_size: int) -> list[MoeCase]:
    """Both splits of every set. ValueError for a set without experts, or fewer experts than ranks."""
    size = size_of(settings)
    names = tuple(settings.get("shapes") or (("small",) if size == "quick" else ("small", "fine")))
    given = settings.get("tokens")
    chosen = [SIZES[name] if name in SIZES else _known(name) for name in names]
    for sizes in chosen:
        if sizes.experts % world_size:
            raise ValueError(
                f"bench: {sizes.experts} experts do not divide by {world_size} ranks; use --ranks that do"
            )
    dtypes = dtypes_of(settings)[: 1 if size == "quick" else None]
    return [
        MoeCase(split, sizes, tokens, dtype, world_size)
        for dtype, sizes in itertools.product(dtypes, chosen)
        for split in ("experts", "features")
        for tokens in ((int(given),) if given else TOKENS[size])
    ]


def _known(name: str) -> ExpertSizes:
    architecture = architecture_of(name, tuple(SIZES))
    if architecture.moe is None:
        raise ValueError(f"bench: {name} has no experts; expected small, fine, mixtral or deepseek")
    moe = architecture.moe
    return ExpertSizes(name, architecture.hidden, moe.intermediate, moe.experts, moe.top_k)


@dataclass(frozen=True)
class Experts:
    """gate_up [E, 2 I, H], down [E, H, I] of the experts (or of this rank's features of all) on this rank."""

    gate_up: Tensor
    down: Tensor

    def __call__(self, x: Tensor, counts: list[int]) -> Tensor:
        """x [rows, H], rows of one expert behind those of the last -> [rows, H]."""
        out = []
        for rows, gate_up, down in zip(x.split(counts), self.gate_up, self.down, strict=True):
            if rows.shape[0]:
                gate, up = F.linear(rows, gate_up).chunk(2, -1)
                out.append(F.linear(F.silu(gate) * up, down))
        return torch.cat(out) if out else x.new_zeros(0, x.shape[1])


@dataclass(frozen=True)
class Routed:
    """Who goes where: of this rank's tokens, sorted by expert. index: token of each routed row, share: its weight."""

    index: Tensor
    share: Tensor
    counts: list[int]  # rows for every expert, all ranks' experts

    @classmethod
    def of(cls, x: Tensor, router: Tensor, top_k: int) -> Routed:
        """x [T, H], router [E, H]: softmax over the top_k largest, as Mixtral does."""
        shares, experts = F.linear(x, router).float().topk(top_k, dim=-1)
        shares = shares.softmax(-1).to(x.dtype)
        order = experts.flatten().argsort(stable=True)
        counts = torch.bincount(experts.flatten(), minlength=router.shape[0])
        return cls(order // top_k, shares.flatten()[order].unsqueeze(-1), counts.tolist())

    def combined(self, rows: Tensor, tokens: int) -> Tensor:
        """Routed rows [T k, H], weighted and summed by token -> [T, H]; in fp32, as sums of few terms."""
        out = torch.zeros(tokens, rows.shape[1], dtype=torch.float32)
        return out.index_add_(0, self.index, (rows * self.share).float()).to(rows.dtype)


Exchange = Callable[[Tensor, list[int], list[int]], Tensor]


def dispatched(x: Tensor, router: Tensor, mine: Experts, top_k: int, exchange: Exchange) -> Tensor:
    """x [T, H] of this rank -> [T, H]: route, dispatch, multiply, combine; four steps as a user writes them."""
    size = dist.get_world_size()
    routed = Routed.of(x, router, top_k)
    local = router.shape[0] // size
    counts = exchange(torch.tensor(routed.counts).unsqueeze(-1), [local] * size, [local] * size)
    theirs = counts.view(size, local)
    receive = theirs.sum(1).tolist()
    send = torch.tensor(routed.counts).view(size, local).sum(1).tolist()
    rows = exchange(x[routed.index], receive, send)
    place = by_expert(theirs)
    done = torch.empty_like(rows)
    done[place] = mine(rows[place], theirs.sum(0).tolist())
    return routed.combined(exchange(done, send, receive), x.shape[0])


def by_expert(counts: Tensor) -> Tensor:
    """counts [ranks, experts] of rows that arrived rank by rank -> their places, expert by expert."""
    ranks, local = counts.shape
    owner = torch.arange(local).repeat(ranks).repeat_interleave(counts.flatten())
    return owner.argsort(stable=True)


def by_torch(x: Tensor, receive: list[int], send: list[int]) -> Tensor:
    """Rows exchanged by torch.distributed."""
    out = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), receive, send)
    return out


def by_interlace(group: str) -> Exchange:
    """Rows exchanged on the symmetric heap."""
    return lambda x, receive, send: functional.all_to_all(x, receive, send, group=group)


@dataclass(frozen=True)
class Problem:
    """Tensors of a case, the same on every rank: x of all ranks, router, all experts; and the unsplit answer."""

    x: Tensor
    router: Tensor
    whole: Experts
    want: Tensor
    limit: float


def problem(case: MoeCase) -> Problem:
    """Random weights; the oracle routes as the dtype does and multiplies in fp32."""
    s, generator = case.sizes, torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(case.dtype)

    x, router = draw(case.tokens, s.hidden), draw(s.experts, s.hidden, scale=0.05)
    whole = Experts(
        draw(s.experts, 2 * s.intermediate, s.hidden, scale=s.hidden**-0.5),
        draw(s.experts, s.hidden, s.intermediate, scale=s.intermediate**-0.5),
    )
    routed = Routed.of(x, router, s.top_k)
    exact = Experts(whole.gate_up.float(), whole.down.float())
    want = Routed(routed.index, routed.share.float(), routed.counts).combined(
        exact(x.float()[routed.index], routed.counts), case.tokens
    )
    rough = relative_error(routed.combined(whole(x[routed.index], routed.counts), case.tokens), want)
    return Problem(x, router, whole, want, max(2 * rough, 1e-5))


def split_by_experts(
    session: Session, case: MoeCase, p: Problem
) -> tuple[dict[str, Callable[[], object]], dict[str, object]]:
    """Checked variants with whole experts on the ranks, and what to say of them."""
    size, rank, s = session.world_size, session.rank, case.sizes
    local = s.experts // size
    mine = Experts(
        *(w[rank * local : (rank + 1) * local].contiguous() for w in (p.whole.gate_up, p.whole.down))
    )
    own = slice(*chunk_range(case.tokens, size, rank))
    x = p.x[own].contiguous()
    ours = by_interlace(session.group.name)
    calls: dict[str, Callable[[], Tensor]] = {
        "fused": partial(dispatched, x, p.router, mine, s.top_k, ours),
        "baseline": partial(dispatched, x, p.router, mine, s.top_k, by_torch),
    }
    for name, call in calls.items():
        session.check(f"{case.name} {name}", call(), p.want[own], p.limit)
    # rows each rank sends to each: from all tokens, which every rank has here
    parts = [slice(*chunk_range(case.tokens, size, r)) for r in range(size)]
    sent = [torch.tensor(Routed.of(p.x[part], p.router, s.top_k).counts).view(size, local) for part in parts]
    arriving = torch.stack([sent[r][rank] for r in range(size)])
    send, receive = sent[rank].sum(1).tolist(), [int(sent[r][rank].sum()) for r in range(size)]
    there, back = x.new_zeros(sum(send), s.hidden), x.new_zeros(sum(receive), s.hidden)
    loads = [int(sum(sent[r][to].sum() for r in range(size))) for to in range(size)]

    def exchanges() -> object:
        ours(there, receive, send)
        return ours(back, send, receive)

    moved = 2 * (sum(send) - send[rank]) * s.hidden * case.dtype.itemsize
    told = {"imbalance": max(loads) * size / sum(loads), "moved_mb": moved / 1e6}

    def nothing(rows: Tensor, to: list[int], of: list[int]) -> Tensor:
        """In the place of an exchange: what would arrive is known, or does not matter."""
        if rows.dtype is torch.int64:
            return arriving.view(-1, 1)
        return back if to == receive else there

    alone = partial(dispatched, x, p.router, mine, s.top_k, nothing)
    return {**calls, "compute": alone, "collective": exchanges}, told


def split_by_features(
    session: Session, case: MoeCase, p: Problem
) -> tuple[dict[str, Callable[[], object]], dict[str, object]]:
    """Checked variants with a part of every expert on the ranks, and what to say of them."""
    s = case.sizes
    model = interlace.parallelize(_mixtral(case, p), None)
    split = model.model.layers[0].mlp  # type: ignore[union-attr,index]
    inner = slice(*chunk_range(s.intermediate, session.world_size, session.rank))
    gate_up = torch.cat([half[:, inner] for half in p.whole.gate_up.chunk(2, 1)], 1).contiguous()
    mine = Experts(gate_up, p.whole.down[:, :, inner].contiguous())
    routing = partial(Routed.of, p.x, p.router, s.top_k)

    def local() -> Tensor:
        routed = routing()
        return routed.combined(mine(p.x[routed.index], routed.counts), case.tokens)

    def with_torch() -> Tensor:
        out = local()
        dist.all_reduce(out)
        return out

    def ours() -> Tensor:
        out = split(p.x.unsqueeze(0))
        return (out[0] if isinstance(out, tuple) else out).squeeze(0)

    calls: dict[str, Callable[[], Tensor]] = {"fused": ours, "baseline": with_torch}
    for name, call in calls.items():
        # partial sums of the ranks are rounded once more than the unsplit experts' are
        session.check(f"{case.name} {name}", call(), p.want, 2 * p.limit)
    moved = 2 * (session.world_size - 1) / session.world_size * p.x.nbytes
    told = {"imbalance": 1.0, "moved_mb": moved / 1e6}
    return {**calls, "compute": local, "collective": sums(session, p.x, 1)}, told


def _mixtral(case: MoeCase, p: Problem) -> nn.Module:
    """One layer of transformers' Mixtral with the problem's router and experts."""
    import transformers

    s = case.sizes
    config = transformers.MixtralConfig(
        hidden_size=s.hidden, intermediate_size=s.intermediate, num_local_experts=s.experts,
        num_experts_per_tok=s.top_k, num_hidden_layers=1, num_attention_heads=s.hidden // 64,
        num_key_value_heads=s.hidden // 64, vocab_size=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = transformers.MixtralForCausalLM(config).to(case.dtype).eval().requires_grad_(False)
    block = model.model.layers[0].mlp
    block.gate.weight.copy_(p.router)
    block.experts.gate_up_proj.copy_(p.whole.gate_up)
    block.experts.down_proj.copy_(p.whole.down)
    whole: nn.Module = model
    return whole


def one(session: Session, case: MoeCase) -> None:
    """Check and time one split."""
    p = problem(case)
    how = split_by_experts if case.split == "experts" else split_by_features
    variants, told = how(session, case, p)
    path = interlace.last_path()
    extra = {"experts": case.sizes.experts, "top_k": case.sizes.top_k, **told}
    baseline = "all_to_all_single" if case.split == "experts" else f"all-reduce, {session.backend}"
    session.record(
        variants,
        flops=case.flops,
        algorithm=path.algorithm,
        reason=path.reason,
        baseline=baseline,
        extra=extra,
        **case.identity(),
    )


def readme(report: Report) -> str:
    """A line per split and size."""
    return readme_of(report, README)


def run(settings: Mapping[str, object]) -> int:
    """On every rank."""
    session = Session("moe", COLUMNS, settings)
    return session.run(cases(settings, session.world_size), lambda case: one(session, case))
