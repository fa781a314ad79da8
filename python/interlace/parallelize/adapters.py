"""LoRA adapters of PEFT on split linears: the small matrices are split as the linear under them.

A column linear Y_r = X W_r^T gets A whole and B by rows: Y_r += s (X A^T) B_r^T. A row linear Y = sum_r X_r W_r^T gets
A by columns and B whole: Y += s (sum_r X_r A_r^T) B^T. B_r, or A_r, is a parallel linear itself, of the same shards and
the same kind of input as the base, so it carries the one collective of r features that the adapter needs; a whole
matrix that sees shards of a sequence has its gradients summed. Merging needs no communication. Hu et al. 2021, LoRA.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..modules import ColumnParallelLinear, ParallelLinear, RowParallelLinear, SummedGradients

__all__ = ["AdapterGuard", "check_adapters", "install_guards", "split_adapters", "unwrapped"]


def split_adapters(model: nn.Module) -> nn.Module:
    """Split the LoRA adapters on the parallel linears of `model` in place and return it; adapters split already stay.

    Call it after every get_peft_model, add_adapter or load_adapter on a split model, before the optimizer is made;
    parallelize does it for adapters that are there before. Every rank must hold the same adapters: they are made
    from random numbers, so seed alike, or load them. ValueError, with nothing changed, for kinds of adapters that a
    split would make wrong (DoRA and other variants, rank-pattern experts, embeddings of a split linear).
    """
    wrappers = _wrappers(model)
    for name, wrapper in wrappers:
        _check(name, wrapper)
    for _, wrapper in wrappers:
        base = wrapper.get_base_layer()
        for adapter in wrapper.lora_A:
            _split(wrapper, base, adapter)
    return model


def check_adapters(model: nn.Module, split: Collection[str]) -> None:
    """ValueError when an adapter on a module that will be `split` is of a kind that split_adapters refuses."""
    for name, module in model.named_modules():
        if _is_lora(module) and name in split:
            _check(name, module)


def install_guards(model: nn.Module) -> None:
    """Make an adapter that is added later, and not split, an error where its shapes would not tell."""
    for module in model.modules():
        if any(
            isinstance(child, ColumnParallelLinear) and child.shards.overlapping
            for child in module.children()
        ):
            module.register_forward_pre_hook(AdapterGuard())


@contextmanager
def unwrapped(model: nn.Module) -> Iterator[None]:
    """Within, every adapted module of `model` is the plain module under its adapters, at the same name.

    What stands at its place in the end becomes the new module under the adapters.
    """
    wrapped = [
        (name, module) for name, module in model.named_modules(remove_duplicate=False) if _is_lora(module)
    ]
    for name, wrapper in wrapped:
        _put(model, name, wrapper.base_layer)
    try:
        yield
    finally:
        for name, wrapper in wrapped:
            wrapper.base_layer = model.get_submodule(name)
            _put(model, name, wrapper)


class AdapterGuard:
    """Forward pre-hook of a module that holds linears with copies on several ranks.

    An adapter of such a linear has the same shapes split or not, so one that was not split would train on a part of
    its gradient without any error.
    """

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        for child in module.children():
            if not isinstance(child, nn.Linear) and _is_unsplit(child):
                raise ValueError(
                    f"{type(module).__name__}: its {type(child).__name__} adapters were added after parallelize; "
                    "call interlace.split_adapters(model) once they are all there"
                )


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _is_lora(module: nn.Module) -> bool:
    """A LoRA wrapper of PEFT, told by its parts: PEFT need not be there."""
    return hasattr(module, "lora_A") and hasattr(module, "lora_B") and hasattr(module, "base_layer")


def _wrappers(model: nn.Module) -> list[tuple[str, Any]]:
    """LoRA wrappers around split modules, by name."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if _is_lora(module) and hasattr(type(module.get_base_layer()), "parameter_layouts")
    ]


def _is_unsplit(module: Any) -> bool:
    if not _is_lora(module) or not isinstance(module.base_layer, ParallelLinear):
        return False
    split = module.lora_B if isinstance(module.base_layer, ColumnParallelLinear) else module.lora_A
    return any(not isinstance(part, ParallelLinear) for part in split.values())


def _check(name: str, wrapper: Any) -> None:
    base = wrapper.get_base_layer()
    problem = ""
    if not isinstance(base, nn.Linear):
        problem = f"it is on a {type(base).__name__}, and only those of linears can"
    elif wrapper.lora_variant:
        kinds = {type(variant).__name__ for variant in wrapper.lora_variant.values()}
        problem = f"{', '.join(sorted(kinds))} reads the whole weight"
    elif wrapper.merged:
        problem = "it is merged; unmerge it first"
    elif getattr(base, "return_bias", False):
        problem = "the linear returns (Y, bias), which adapters do not understand"
    for parts in (wrapper.lora_A, wrapper.lora_B):
        for adapter, part in parts.items():
            if type(part) not in (nn.Linear, ColumnParallelLinear, RowParallelLinear, SummedGradients):
                problem = problem or f"its part {adapter!r} is a {type(part).__name__}, not an nn.Linear"
    if problem:
        raise ValueError(
            f"split_adapters: the adapter of {name} cannot be split: {problem}; use plain LoRA, or leave this module "
            "out of target_modules"
        )


def _split(wrapper: Any, base: ParallelLinear, adapter: str) -> None:
    a, b = wrapper.lora_A[adapter], wrapper.lora_B[adapter]
    if isinstance(base, ColumnParallelLinear):
        if isinstance(b, ColumnParallelLinear):
            return
        sees_shards = base.sequence_parallel and not base.reads_gathered
        new = ColumnParallelLinear.from_linear(
            b, base.group_name, shards=base.shards, gather_output=base.gather_output,
            sequence_parallel=sees_shards, sequence_dim=base.sequence_dim,
        )  # fmt: skip
        new.sequence_length = base.sequence_length
        wrapper.lora_B[adapter] = new
        if sees_shards:
            wrapper.lora_A[adapter] = SummedGradients(a, base.group_name)
        return
    assert isinstance(base, RowParallelLinear)
    if isinstance(a, RowParallelLinear):
        return
    wrapper.lora_A[adapter] = RowParallelLinear.from_linear(
        a, base.group_name, shards=base.shards, input_is_parallel=base.input_is_parallel,
        sequence_parallel=base.sequence_parallel, sequence_dim=base.sequence_dim, drop_input=base.drop_input,
    )  # fmt: skip
    if base.sequence_parallel:
        wrapper.lora_B[adapter] = SummedGradients(b, base.group_name)
