"""The plan: what happens to which module of a model, and the check that all of it can be done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from ..groups import GroupInfo
from ..modules import ParallelLinear, SummedGradients
from ..modules.linear import check_splittable
from ..modules.shard import Shards
from .conv1d import is_conv1d

__all__ = ["ALIASES", "LINEAR_STYLES", "STYLES", "Block", "Place", "Plan", "Step", "check_plan", "matches"]

STYLES = {
    "column": "nn.Linear cut by output features",
    "row": "nn.Linear cut by input features, outputs summed",
    "column_gather_output": "column, and every rank gets all output features",
    "row_split_input": "row, of an input that every rank has in full",
    "vocab_embedding": "nn.Embedding cut by rows; may share its weight with a vocab_head",
    "vocab_head": "nn.Linear cut by output features, whole bias, every rank gets all of them",
    "summed": "replicated module whose ranks see different data: gradients are summed",
    "scatter_sequence": "the first input of the module is cut along the sequence (with sequence_parallel)",
    "gather_sequence": "the output of the module is gathered along the sequence (with sequence_parallel)",
}
ALIASES = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "column_gather_output",
    "colwise_rep": "column_gather_output",
    "rowwise_split_input": "row_split_input",
    "embedding_rowwise": "vocab_embedding",
    "replicated_with_grad_allreduce": "summed",
}
LINEAR_STYLES = ("column", "row", "column_gather_output", "row_split_input")
UNCUT = ("replicated", "summed")
# cut by the same rows, so a parameter may be tied between them
ROWS_CUT = ("column", "column_gather_output", "vocab_embedding", "vocab_head")

Finish = Callable[[nn.Module, GroupInfo], None]
Make = Callable[[nn.Module, GroupInfo, "Plan"], nn.Module]


@dataclass(frozen=True)
class Place:
    """Where a plan is made: this rank of how many, and whether activations are cut along the sequence."""

    rank: int
    world_size: int
    sequence_parallel: bool = False


@dataclass(frozen=True)
class Step:
    """One module and its style; `shards` for linears that are not cut by the convention of torch.chunk.

    `make` builds what takes the place of a module that is no linear, from (module, group, plan).
    """

    name: str
    style: str
    shards: Shards | None = None
    make: Make | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Block:
    """What is known of one attention or feed-forward block: its part of the plan.

    `shared`: linears that read one input. `attributes` and `config`: numbers of this rank, which the block reads
    from itself and from its config. `pre_hooks`: of the block, with keyword arguments. `stand_in`: name of the one
    input and of one projection, when nothing but the projections uses its values. `whole`: modules with matrices
    that stay on every rank as they are. `not_sequence`: why the sequence cannot be cut around this block.
    `claimed`: modules inside that are no blocks of their own. `finish`: called with the model when every module is
    in its place.
    """

    name: str
    kind: str  # "attention" or "feed_forward"
    steps: tuple[Step, ...]
    shared: tuple[tuple[str, ...], ...] = ()
    attributes: dict[str, int] = field(default_factory=dict)
    config: dict[str, int] = field(default_factory=dict)
    pre_hooks: tuple[Callable[..., object], ...] = ()
    stand_in: tuple[str, str] | None = None
    whole: tuple[str, ...] = ()
    not_sequence: str = ""
    claimed: tuple[str, ...] = ()
    finish: tuple[Finish, ...] = ()


@dataclass
class Plan:
    """Everything `apply` will do.

    `shared`: linears of one input. `attributes`, `configs`: new numbers for modules and for what they read of their
    config. `pre_hooks`: by module. `sources`: who decided, by module. With `sequence_parallel` linears read and
    write sequence shards; `scatters` and `gathers` are the modules whose input is cut and whose output is gathered,
    `stand_ins` the attention modules that compute q, k and v from the shards, with the name of their input and of
    one projection.
    """

    steps: dict[str, Step] = field(default_factory=dict)
    shared: list[tuple[str, ...]] = field(default_factory=list)
    attributes: dict[str, dict[str, int]] = field(default_factory=dict)
    configs: dict[str, dict[str, int]] = field(default_factory=dict)
    pre_hooks: dict[str, tuple[Callable[..., object], ...]] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    finishers: list[Finish] = field(default_factory=list)
    scatters: list[str] = field(default_factory=list)
    gathers: list[str] = field(default_factory=list)
    stand_ins: dict[str, tuple[str, str]] = field(default_factory=dict)
    sequence_parallel: bool = False

    def add(self, step: Step) -> None:
        """Add a step; ValueError when the module has another style already."""
        before = self.steps.get(step.name)
        if before is not None and before.style != step.style:
            raise ValueError(
                f"parallelize: {step.name} would be both {before.style} and {step.style}; make the patterns "
                "disjoint"
            )
        self.steps[step.name] = step

    def add_block(self, block: Block) -> None:
        """Add all of a block; ValueError when it contradicts another."""
        for step in block.steps:
            self.add(step)
        self.shared += block.shared
        self.whole |= set(block.whole)
        self.finishers += block.finish
        for numbers, mine in ((self.attributes, block.attributes), (self.configs, block.config)):
            if mine:
                numbers[block.name] = {**numbers.get(block.name, {}), **mine}
        if block.pre_hooks:
            self.pre_hooks[block.name] = block.pre_hooks
        if self.sequence_parallel and block.stand_in is not None:
            self.stand_ins[block.name] = block.stand_in


def matches(pattern: str, name: str) -> bool:
    """Whether a dotted name fits a pattern, in which `*` stands for one part of it."""
    parts, names = pattern.split("."), name.split(".")
    return len(parts) == len(names) and all(fnmatchcase(n, p) for n, p in zip(names, parts, strict=True))


def check_plan(model: nn.Module, plan: Plan) -> None:
    """Raise ValueError or TypeError when a step cannot be done; after this `apply` does not fail."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, module in modules.items():
        if isinstance(module, ParallelLinear | SummedGradients) or hasattr(module, "parameter_layouts"):
            raise ValueError(
                f"parallelize: {name} is a {type(module).__name__} already; parallelize a model once"
            )
    for step in plan.steps.values():
        _check_step(step, modules)
    _check_ties(modules, plan)


def _check_step(step: Step, modules: dict[str, nn.Module]) -> None:
    module = modules[step.name]
    if step.make is not None:
        return
    if step.style in LINEAR_STYLES:
        if not is_conv1d(module):
            check_splittable(f"parallelize: {step.name}", module)
        if isinstance(modules[step.name.rpartition(".")[0]], nn.MultiheadAttention):
            raise TypeError(
                f"parallelize: {step.name} belongs to nn.MultiheadAttention, which reads its weight "
                "without calling it; use interlace.modules.ParallelAttention"
            )
    elif step.style == "summed" and any(True for c in module.children() for _ in c.parameters()):
        raise ValueError(
            f"parallelize: {step.name} has children with parameters; name each of them as summed"
        )


def _check_ties(modules: dict[str, nn.Module], plan: Plan) -> None:
    """A parameter used in two places must be cut alike in both."""
    holders: dict[int, list[tuple[str, str]]] = {}
    for name, module in modules.items():
        for param_name, param in module.named_parameters(recurse=False):
            style = plan.steps[name].style if name in plan.steps else "replicated"
            if (style, param_name) == ("vocab_head", "bias"):
                style = "replicated"  # whole on every rank
            holders.setdefault(id(param), []).append((f"{name}.{param_name}", style))
    for places in holders.values():
        styles = {"column" if style in ROWS_CUT else style.partition("_")[0] for _, style in places}
        if len(styles) > 1 and not styles <= set(UNCUT):
            told = ", ".join(f"{name} ({style})" for name, style in places)
            raise ValueError(f"parallelize: one tied parameter would be cut in different ways: {told}")
