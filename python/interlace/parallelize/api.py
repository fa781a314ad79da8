"""`interlace.parallelize`: split a model that knows nothing of it over a group, in place."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ..groups import Group, GroupInfo, resolve
from .adapters import check_adapters, install_guards, split_checked, unwrapped
from .agree import agree
from .apply import apply
from .patterns import dict_plan
from .plan import Place, Plan, check_plan
from .report import op_of, path_of
from .structure import auto_plan
from .wrappers import install_replica_guard

__all__ = ["parallelize"]


def parallelize(
    model: nn.Module,
    mesh: Group,
    plan: str | Mapping[str, str] = "auto",
    *,
    sequence_parallel: bool = False,
    strict: bool = False,
) -> nn.Module:
    """Split the linears of `model` over `mesh` in place and return it; every rank of the group calls it.

    mesh: one-axis DeviceMesh (mesh["tp"]), ProcessGroup, group name, or None for all ranks. plan: "auto"
    recognises stacks of attention and feed-forward blocks by the names, shapes and source of their modules: q, k and v
    of their own or packed (Llama, Mistral, Qwen, Gemma, Phi, GPT-2, GPT-NeoX, OPT, Falcon, Bloom, BERT, ViT, T5,
    Whisper and models built alike, with experts or latent attention too), and follows the plan that a Hugging Face
    model brings where that must be right. Heads are cut whole, evenly or not, by key/value groups. A dict gives
    {pattern of module names: style}, for example {"layers.*.mlp.up": "column", "layers.*.mlp.down": "row"}, where
    `*` is one part of a name; the styles are in `interlace.parallelize.STYLES`. Names and dtypes of parameters stay;
    shapes become those of this rank's shards. Embedding and output head are cut by the vocabulary where that is known
    to be right, norms are whole, tied parameters stay tied, the config of the model is not changed.
    LoRA adapters of PEFT that are there are split with their linears (those that come later: `split_adapters`).

    sequence_parallel: activations between the blocks are shards of the sequence (dim -2), all-reduces become
    all-gathers and reduce-scatters. strict: raise ValueError, naming module and reason, when a linear of the plan
    would not be fused (no symmetric memory, a dtype without kernel).

    Every rank must hold the same parameters. Raises ValueError or TypeError, on every rank and with the model
    unchanged, when a pattern matches nothing, a module cannot be split, the architecture is not known, the
    model is parallel already, tied parameters would be cut in different ways, or ranks disagree.
    """
    info = resolve(mesh)
    decided: Plan | None = None
    problem: Exception | None = None
    try:
        decided = _checked(model, info, plan, sequence_parallel, strict)
    except Exception as error:  # whatever it is, the peers wait in agree() and must hear of it
        problem = error
    agree(info, model, decided, problem)
    assert decided is not None
    with unwrapped(model):
        apply(model, decided, info)
        install_guards(model)
        install_replica_guard(model, info)
        for name, source in decided.sources.items():
            model.get_submodule(name).plan_source = source
    return split_checked(model)


def _checked(
    model: nn.Module, info: GroupInfo, plan: str | Mapping[str, str], sequence_parallel: bool, strict: bool
) -> Plan:
    """The plan, of which every step can be done."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"parallelize: expected an nn.Module, got {type(model).__name__}")
    with unwrapped(model):
        decided = _decide(model, info, plan, sequence_parallel)
        check_plan(model, decided)
        _check_dtypes(model, decided)
        if strict:
            _check_fused(model, decided, info)
    check_adapters(model, decided.steps)
    return decided


def _check_dtypes(model: nn.Module, plan: Plan) -> None:
    """Linears that read one input have one dtype: unsplit, the call of one of them would fail."""
    for names in plan.shared:
        dtypes = {name: next(model.get_submodule(name).parameters()).dtype for name in names}
        if len(set(dtypes.values())) > 1:
            told = ", ".join(f"{name} is {dtype}" for name, dtype in dtypes.items())
            raise TypeError(f"parallelize: linears of one input differ in dtype: {told}; cast the model")


def _check_fused(model: nn.Module, plan: Plan, info: GroupInfo) -> None:
    for step in plan.steps.values():
        param = next(model.get_submodule(step.name).parameters())
        op = op_of(step.style, plan.sequence_parallel)
        if not op:
            continue
        fused, reason = path_of(info, op, param.dtype, param.device)
        if not fused:
            raise ValueError(f"parallelize: strict=True, but {op} of {step.name} is not fused: {reason}")


def _decide(
    model: nn.Module, info: GroupInfo, plan: str | Mapping[str, str], sequence_parallel: bool
) -> Plan:
    place = Place(info.rank, info.world_size, sequence_parallel)
    if isinstance(plan, Mapping):
        return dict_plan(model, plan, place)
    if plan != "auto":
        raise ValueError(f'parallelize: plan={plan!r}; expected "auto" or a dict of patterns and styles')
    return auto_plan(model, place)
