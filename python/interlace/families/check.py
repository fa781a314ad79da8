"""One family against its unsplit model: forward, the gradient of every parameter, generation."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from interlace.families.catalogue import Family, build, inputs
from interlace.groups import Group, resolve
from interlace.modules.layout import layouts_of
from interlace.parallelize import parallelize, report
from interlace.parallelize.plan import Place
from interlace.parallelize.structure import auto_plan

__all__ = ["LIMIT", "NEW_TOKENS", "Row", "check", "compare", "generated", "loss_of", "worst_gradient"]

LIMIT = 2e-5  # relative Frobenius norm in fp32; a term that is lost or counted twice gives 1e-3 and more
SMALL = 1e-2  # of the largest gradient: below, a gradient may be zero but for rounding (biases of keys)
NEW_TOKENS = 6
CACHES: Mapping[str, Mapping[str, Any]] = {"dynamic": {}, "static": {"cache_implementation": "static"}}


@dataclass(frozen=True)
class Row:
    """What came out for one family. Errors are relative; None: not reached, or not a thing the family does.

    source: where the plan came from. fused, collectives: modules whose collective runs inside the product, and
    modules that have one. split: share of the parameters that is cut. problem: what went wrong, "" if nothing.
    """

    family: str
    title: str
    model: str
    worlds: str
    forward: float | None = None
    gradients: float | None = None
    dynamic: bool | None = None
    static: bool | None = None
    source: str = ""
    fused: int = 0
    collectives: int = 0
    split: float = 0.0
    problem: str = ""

    @property
    def passed(self) -> bool:
        """True when everything that the family does equals the unsplit model."""
        return not self.problem

    def keys(self) -> dict[str, object]:
        """The row for JSON."""
        return {**asdict(self), "passed": self.passed}

    @classmethod
    def of(cls, keys: Mapping[str, Any]) -> Row:
        """The row that `keys` came from."""
        return cls(**{name: value for name, value in keys.items() if name != "passed"})

    @classmethod
    def worst(cls, rows: Sequence[Row]) -> Row:
        """One row for a family in several worlds: the largest errors, the fewest fused, the first problem."""
        first = rows[0]
        return replace(
            min(rows, key=lambda row: row.fused - row.collectives),
            worlds=", ".join(row.worlds for row in rows),
            forward=_largest([row.forward for row in rows]),
            gradients=_largest([row.gradients for row in rows]),
            dynamic=None if first.dynamic is None else all(row.dynamic for row in rows),
            static=None if first.static is None else all(row.static for row in rows),
            problem=next((row.problem for row in rows if row.problem), ""),
        )


def _largest(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known, default=None)


def check(family: Family, group: Group = None, **options: Any) -> Row:
    """Split a random model of `family` over the group and compare it with the unsplit one. Collective.

    Every rank returns the same row. options change the configuration. Nothing is raised for a family that is
    refused or wrong: `problem` says which stage it was, on which rank, and why.
    """
    return compare(family, build(family, **options), group)


def compare(family: Family, whole: nn.Module, group: Group = None) -> Row:
    """As `check`, for the model `whole` of the kind of `family`: equal on all ranks, in fp32 and eval mode."""
    info = resolve(group)
    found: dict[str, Any] = {
        "family": family.name, "title": family.title, "model": family.model, "worlds": str(info.world_size),
    }  # fmt: skip
    arguments = inputs(family)
    split = copy.deepcopy(whole)
    stages: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        ("parallelize", lambda: _split(whole, split, group)),
        ("forward", lambda: _forward(whole, split, arguments)),
        ("gradients", lambda: {"gradients": worst_gradient(whole, split, info.rank)}),
    ]
    if family.generates:
        stages.append(("dynamic", lambda: {"dynamic": _same_tokens(family, whole, split, "dynamic")}))
        if family.static:
            stages.append(("static", lambda: {"static": _same_tokens(family, whole, split, "static")}))
    for name, stage in stages:
        problem = ""
        try:
            result = stage()
            problem = _judge(result)
            found |= result
        except Exception as error:  # of a family under trial: told in its row
            problem = f"{type(error).__name__}: {error}"
        problem = _first_problem(problem, group)
        if problem:
            return Row(**found, problem=f"{name}: {problem}")
    return Row(**found)


def _judge(result: Mapping[str, Any]) -> str:
    for name, value in result.items():
        if name in ("forward", "gradients") and not value <= LIMIT:
            return f"relative error {value:.1e}, allowed {LIMIT:.0e}"
        if value is False:
            return "other tokens than the unsplit model's"
    return ""


def _first_problem(problem: str, group: Group) -> str:
    """Of the lowest rank that has one, the same on every rank."""
    info = resolve(group)
    if info.world_size == 1:
        return problem
    problems = [""] * info.world_size
    dist.all_gather_object(problems, problem, group=_process_group(info.name))
    rank = next((rank for rank, text in enumerate(problems) if text), None)
    if rank is None:
        return ""
    alike = all(text == problems[rank] for text in problems)
    return problems[rank] if alike else f"rank {rank}: {problems[rank]}"


def _process_group(name: str) -> dist.ProcessGroup:
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)


def _split(whole: nn.Module, model: nn.Module, group: Group) -> dict[str, Any]:
    total = sum(param.numel() for param in model.parameters())
    info = resolve(group)
    try:
        plan = auto_plan(model, Place(info.rank, info.world_size))
        parallelize(model, group)
    except (ValueError, TypeError) as refusal:
        changed = _changed(whole, model)
        if changed:
            raise RuntimeError(f"refused, but {changed} was changed: {refusal}") from refusal
        raise
    rows = [row for row in report(model).rows if row.op]
    names = dict(model.named_parameters())
    layouts = layouts_of(model)
    cut = {name: layout for name, layout in layouts.items() if name in names}
    return {
        "source": " + ".join(sorted({source.partition(" (")[0] for source in plan.sources.values()})),
        "fused": sum(row.fused for row in rows),
        "collectives": len(rows),
        "split": sum(torch.Size(layout.shape).numel() for layout in cut.values()) / total,
    }


def _changed(whole: nn.Module, model: nn.Module) -> str:
    """The first module or parameter of a refused model that is not as before; "" when all are."""
    for (name, before), (_, after) in zip(whole.named_modules(), model.named_modules(), strict=True):
        if type(before) is not type(after) or set(vars(before)) != set(vars(after)):
            return name
    before, after = whole.state_dict(), model.state_dict()
    return next((name for name in before if not torch.equal(before[name], after[name])), "")


def loss_of(model: nn.Module, arguments: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The logits, and a loss that weighs every logit differently."""
    logits: Tensor = model(**arguments).logits
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3)).to(logits.dtype)
    return logits, (logits * weights).sum()


def _forward(whole: nn.Module, split: nn.Module, arguments: Mapping[str, Tensor]) -> dict[str, Any]:
    expected, whole_loss = loss_of(whole, arguments)
    whole_loss.backward()
    logits, loss = loss_of(split, arguments)
    loss.backward()
    return {"forward": _distance(logits.detach(), expected.detach(), 0.0)}


def worst_gradient(whole: nn.Module, split: nn.Module, rank: int) -> float:
    """The largest relative error of a gradient after a backward of both models, each against its own part.

    Infinite when names, shapes or the set of parameters that have a gradient differ.
    """
    layouts = layouts_of(split)
    found = dict(split.named_parameters())
    expected = dict(whole.named_parameters())
    if set(found) != set(expected):
        return float("inf")
    largest = max(param.grad.norm().item() for param in expected.values() if param.grad is not None)
    worst = 0.0
    for name, param in expected.items():
        mine, want = found[name].grad, param.grad
        if want is None or mine is None:
            if (want is None) != (mine is None) and _norm(want) + _norm(mine) > 0:
                return float("inf")
            continue
        if name in layouts:
            want = layouts[name].take(want, rank)
        if want.shape != mine.shape:
            return float("inf")
        worst = max(worst, _distance(mine, want, SMALL * largest))
    return worst


def _norm(value: Tensor | None) -> float:
    return 0.0 if value is None else value.norm().item()


def _distance(found: Tensor, expected: Tensor, floor: float) -> float:
    """Frobenius norm of the difference, relative to the expected one; infinite for another shape or NaN."""
    if found.shape != expected.shape or not bool(found.isfinite().all()):
        return float("inf")
    scale = max(expected.norm().item(), floor)
    difference = (found - expected).norm().item()
    return difference / scale if scale else difference


def generated(family: Family, model: nn.Module, cache: str) -> Tensor:
    """Greedy tokens of `model`, with the cache of the given kind: dynamic or static."""
    arguments = {k: v for k, v in inputs(family, seed=2).items() if not k.startswith("decoder_")}
    generate: Any = model.generate
    tokens: Tensor = generate(**arguments, max_new_tokens=NEW_TOKENS, do_sample=False, **CACHES[cache])
    return tokens


def _same_tokens(family: Family, whole: nn.Module, split: nn.Module, cache: str) -> bool:
    with torch.no_grad():
        return torch.equal(generated(family, split, cache), generated(family, whole, cache))
