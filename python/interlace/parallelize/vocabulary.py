"""The vocabulary of a model: its embedding and its output head cut by rows, tied or not, or left whole for a reason."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import nn

from ..groups import GroupInfo
from ..modules.embedding import VocabParallelEmbedding, VocabParallelHead, check_embedding
from ..modules.linear import check_splittable
from .plan import Plan, Step
from .weight_use import looks_up_by_super, why_weight_is_read

__all__ = ["VOCABULARY_STYLES", "add_vocabulary", "vocabulary_step"]

VOCABULARY_STYLES = ("vocab_embedding", "vocab_head")
NO_VOCABULARY = re.compile(r"pos|type|segment|time|relative|class|wpe")  # in the name of an embedding


def add_vocabulary(model: nn.Module, plan: Plan, modules: dict[str, nn.Module]) -> None:
    """Add the steps of embedding and output head, where cutting them is known to be right.

    Modules of one Parameter are cut alike or not at all. What stays whole gets the attribute `whole_because`, which
    the report shows.
    """
    free = {
        name: module
        for name, module in modules.items()
        if isinstance(module, nn.Embedding | nn.Linear) and name not in plan.steps and name not in plan.whole
    }
    reasons: list[tuple[str, str]] = []
    for names in _groups(model, free):
        why = _why_whole(names, modules, free)
        if why:
            reasons += [(name, why) for name in names]
            continue
        for name in names:
            style = "vocab_embedding" if isinstance(modules[name], nn.Embedding) else "vocab_head"
            plan.add(vocabulary_step(name, style, modules[name]))
    plan.finishers.append(Explain(tuple(reasons)))


def _groups(model: nn.Module, free: Mapping[str, nn.Module]) -> list[list[str]]:
    """Names of the modules that share the weight of an embedding or a head of the vocabulary, by weight."""
    by_weight: dict[int, list[str]] = {}
    for name, module in free.items():
        by_weight.setdefault(id(module.weight), []).append(name)
    wanted = {id(module.weight) for module in _named_by_model(model)}
    for weight, names in by_weight.items():
        kinds = {isinstance(free[name], nn.Embedding) for name in names}
        if len(kinds) == 2 or (True in kinds and not any(_is_no_vocabulary(name) for name in names)):
            wanted.add(weight)
    sizes = {
        module.num_embeddings
        for module in free.values()
        if isinstance(module, nn.Embedding) and id(module.weight) in wanted
    }
    for weight, names in by_weight.items():
        if any(isinstance(m, nn.Linear) and m.out_features in sizes for m in (free[name] for name in names)):
            wanted.add(weight)
    return [names for weight, names in by_weight.items() if weight in wanted]


def _is_no_vocabulary(name: str) -> bool:
    return NO_VOCABULARY.search(name.rpartition(".")[2].lower()) is not None


def _named_by_model(model: nn.Module) -> Iterator[nn.Module]:
    """What a Hugging Face model itself calls its embedding and its head."""
    for method in ("get_input_embeddings", "get_output_embeddings"):
        try:
            module = getattr(model, method)()
        except (AttributeError, NotImplementedError):
            continue
        if isinstance(module, nn.Embedding | nn.Linear):
            yield module


def _why_whole(names: list[str], modules: Mapping[str, nn.Module], free: Mapping[str, nn.Module]) -> str:
    """Why these modules of one weight cannot be cut, or ""."""
    weight = free[names[0]].weight
    for name, module in modules.items():
        for own, param in module.named_parameters(recurse=False):
            if param is weight and name not in names:
                return f"its weight is also {name}.{own} of a {type(module).__name__}"
    for name in names:
        try:
            check_vocabulary(name, free[name])
        except (TypeError, ValueError) as error:
            return str(error)
    return why_weight_is_read(modules, {name.rpartition(".")[2] for name in names})


def check_vocabulary(name: str, module: nn.Module) -> None:
    """Raise TypeError or ValueError unless `module` is an embedding or a linear whose rows can be cut."""
    if isinstance(module, nn.Embedding):
        check_embedding(name, module)
        if not looks_up_by_super(module):
            raise TypeError(
                f"{name}: {type(module).__name__} has a forward that does not get its rows from super().forward"
            )
    else:
        check_splittable(name, module)


def vocabulary_step(name: str, style: str, module: nn.Module) -> Step:
    """The step that cuts an embedding or a head. ValueError or TypeError when it cannot be cut in this style."""
    wanted = nn.Embedding if style == "vocab_embedding" else nn.Linear
    if not isinstance(module, wanted):
        raise TypeError(
            f"parallelize: {name}: {style} expects an {wanted.__name__}, got {type(module).__name__}"
        )
    check_vocabulary(f"parallelize: {name}", module)
    return Step(name, style, make=_split)


def _split(old: nn.Module, info: GroupInfo, _plan: Plan) -> nn.Module:
    """This rank's rows of an embedding, or of a head that gathers its logits; both outside the cut sequence."""
    if isinstance(old, nn.Embedding):
        return VocabParallelEmbedding.from_embedding(old, info.name)
    assert isinstance(old, nn.Linear)  # check_vocabulary saw to it
    return VocabParallelHead.from_linear(old, info.name)


@dataclass(frozen=True)
class Explain:
    """Told last, with the split model: why modules stayed whole, and that the vocabulary cannot grow any more."""

    reasons: tuple[tuple[str, str], ...]

    def __call__(self, model: nn.Module, info: GroupInfo) -> None:
        for name, reason in self.reasons:
            model.get_submodule(name).whole_because = reason  # type: ignore[assignment]
        split = any(isinstance(m, VocabParallelEmbedding | VocabParallelHead) for m in model.modules())
        for module in model.modules():
            if split and hasattr(type(module), "resize_token_embeddings"):
                object.__setattr__(module, "resize_token_embeddings", _refuse_to_resize)


def _refuse_to_resize(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise RuntimeError(
        "resize_token_embeddings: the vocabulary of this model is cut over a group; resize before interlace.parallelize"
    )
