"""LoRA adapters of PEFT on split linears: the small matrices are split as the linear under them.

A column linear Y_r = X W_r^T gets A whole and B by rows: Y_r += s (X A^T) B_r^T. A row linear Y = sum_r X_r W_r^T gets
A by columns and B whole: Y += s (sum_r X_r A_r^T) B^T. B_r, or A_r, is a parallel linear itself, of the same shards and
the same kind of input as the base, so it carries the one collective of r features that the adapter needs; a whole
matrix that sees shards of a sequence has its gradients summed. Merging needs no communication. Hu et al. 2021, LoRA.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import functional
from ..groups import resolve
from ..modules import ColumnParallelLinear, ParallelLinear, RowParallelLinear, SummedGradients
from ..random import region
from .agree import agree
from .wrappers import install_save_guard

__all__ = [
    "AdapterGuard",
    "check_adapters",
    "install_guards",
    "is_unsplit",
    "split_adapters",
    "split_checked",
    "unwrapped",
]

SOURCE = "adapter"  # who put it in the plan, for the report


def split_adapters(model: nn.Module) -> nn.Module:
    """Split the LoRA adapters on the parallel linears of `model` in place and return it; adapters split already stay.

    Call it after every get_peft_model, add_adapter or load_adapter on a split model, before the optimizer is made;
    parallelize does it for adapters that are there before. Every rank must hold the same adapters: they are made
    from random numbers, so seed alike, or load them. ValueError, with nothing changed, for kinds of adapters that a
    split would make wrong (DoRA and other variants, adapters of a split embedding, merged ones).
    """
    held = next((m for m in model.modules() if hasattr(type(m), "parameter_layouts")), None)
    if held is None:
        raise ValueError(
            f"split_adapters: {type(model).__name__} has no split modules; call interlace.parallelize, which splits "
            "the adapters that are there"
        )
    wrappers = _wrappers(model)
    problem: Exception | None = None
    try:
        for name, wrapper in wrappers:
            _check(name, wrapper)
    except ValueError as error:  # the peers wait in agree() and must hear of it
        problem = error
    parts = [nn.ModuleList([*w.lora_A.values(), *w.lora_B.values()]) for _, w in wrappers if is_unsplit(w)]
    agree(resolve(cast(Any, held).group_name), nn.ModuleList(parts), None, problem)
    return split_checked(model)


def split_checked(model: nn.Module) -> nn.Module:
    """split_adapters without its checks."""
    install_save_guard(model)
    for _, wrapper in _wrappers(model):
        for adapter in wrapper.lora_A:
            _split(wrapper, wrapper.get_base_layer(), adapter)
    return model


def check_adapters(model: nn.Module, split: Collection[str]) -> None:
    """ValueError when an adapter on a module that will be `split` is of a kind that split_adapters refuses."""
    for name, module in model.named_modules():
        if _is_lora(module) and name in split:
            _check(name, module)


def install_guards(model: nn.Module) -> None:
    """Make an adapter that is added later, and not split, an error where its shapes would not tell."""
    for module in model.modules():
        if any(_hides_its_split(child) for child in module.children()):
            module.register_forward_pre_hook(AdapterGuard())


def _hides_its_split(module: nn.Module) -> bool:
    """True when an adapter that is not split has shapes that fit: all rows are here, or PEFT goes by the shard."""
    if not hasattr(type(module), "parameter_layouts"):
        return False
    return hasattr(module, "nx") or (isinstance(module, ColumnParallelLinear) and module.shards.overlapping)


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
            if is_unsplit(child):
                raise ValueError(
                    f"{type(module).__name__}: its {type(child).__name__} adapters were added after parallelize; "
                    "call interlace.split_adapters(model) once they are all there"
                )


class AdapterDropout(nn.Module):
    """nn.Dropout of what an adapter reads: the same elements on all ranks where x is whole, else each rank its own.

    x whole (dim None): rank 0's number, one gather of 8 bytes, seeds the mask on every rank, so that the replicas of
    the matrix behind it stay equal, whatever state the generators are in.
    """

    def __init__(self, p: float, dim: int | None, group_name: str) -> None:
        super().__init__()
        self.p, self.dim, self.group_name = p, dim, group_name

    def forward(self, x: Tensor) -> Tensor:
        """x -> x with elements dropped, in training."""
        if not self.training:
            return x
        if self.dim is not None:
            with region("sharded", group=self.group_name, device=x.device):
                return F.dropout(x, self.p)
        number = functional.all_gather(torch.randint(2**62, (1,), device=x.device), group=self.group_name)[0]
        generator = torch.Generator(x.device).manual_seed(int(number))
        kept = torch.empty_like(x, requires_grad=False).bernoulli_(1 - self.p, generator=generator)
        return x * (kept if self.p == 1 else kept.div_(1 - self.p))

    def extra_repr(self) -> str:
        """The settings."""
        return f"p={self.p}, dim={self.dim}"


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


def is_unsplit(module: Any) -> bool:
    """True for a LoRA wrapper around a parallel linear whose adapters are not all split."""
    if not _is_lora(module) or not hasattr(type(module.base_layer), "parameter_layouts"):
        return False
    split = module.lora_A if module.base_layer.style == "row" else module.lora_B
    return any(not isinstance(part, ParallelLinear) for part in split.values())


def _check(name: str, wrapper: Any) -> None:
    base = wrapper.get_base_layer()
    problem = ""
    if not isinstance(base, nn.Linear) and not hasattr(base, "nx"):
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
            elif hasattr(type(base), "parameter_layouts") and not _fits(part, base, parts is wrapper.lora_A):
                problem = problem or "it was made for this rank's shard; add adapters before parallelize"
    if problem:
        raise ValueError(
            f"split_adapters: the adapter of {name} cannot be split: {problem}; use plain LoRA, or leave this module "
            "out of target_modules"
        )


def _fits(part: Any, base: Any, is_first: bool) -> bool:
    """Whether a matrix of an adapter has the global size of its linear: PEFT sizes some by the weight it finds."""
    return part.in_features == base.in_features if is_first else part.out_features == base.out_features


def _split(wrapper: Any, base: Any, adapter: str) -> None:
    a, b = wrapper.lora_A[adapter], wrapper.lora_B[adapter]
    if base.style != "row":
        if isinstance(b, ColumnParallelLinear):
            return
        sees_shards = base.sequence_parallel and not base.reads_gathered
        new = ColumnParallelLinear.from_linear(
            b, base.group_name, shards=base.shards, gather_output=base.gather_output,
            sequence_parallel=sees_shards, sequence_dim=base.sequence_dim,
        )  # fmt: skip
        new.sequence_length = base.sequence_length
        dropped = base.sequence_dim if sees_shards else None
        whole, cut, uses_sum = wrapper.lora_A, wrapper.lora_B, sees_shards
    else:
        if isinstance(a, RowParallelLinear):
            return
        new = RowParallelLinear.from_linear(
            a, base.group_name, shards=base.shards, input_is_parallel=base.input_is_parallel,
            sequence_parallel=base.sequence_parallel, sequence_dim=base.sequence_dim, drop_input=base.drop_input,
        )  # fmt: skip
        dropped = -1 if base.input_is_parallel else None
        whole, cut, uses_sum = wrapper.lora_B, wrapper.lora_A, base.sequence_parallel
    dropout = wrapper.lora_dropout[adapter]
    if isinstance(dropout, nn.Dropout) and dropout.p > 0:
        wrapper.lora_dropout[adapter] = AdapterDropout(dropout.p, dropped, base.group_name)
    new.plan_source = SOURCE
    cut[adapter] = new
    if uses_sum:
        whole[adapter] = SummedGradients(whole[adapter], base.group_name)
        whole[adapter].plan_source = SOURCE
