"""Parameters as DTensors: cut once, tied ones together, and read as this rank's plain shard."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

__all__ = ["SplitForward", "check_untouched", "distribute", "local", "run_with"]

_SPLIT_INTO = "_interlace_split_into"  # on an unsplit parameter: the DTensor it became, for those tied to it


def local(param: Tensor | None) -> Tensor | None:
    """This rank's part of a parameter as a plain tensor; its gradient comes back as a DTensor placed like the
    parameter.
    """
    return param.to_local() if isinstance(param, DTensor) else param


def run_with(module: nn.Module, params: dict[str, Tensor | None], args: Any, kwargs: Any) -> Any:
    """The forward of the module's class, for the length of the call with `params` in place of its own."""
    own = dict(module._parameters)
    module._parameters.update(params)  # type: ignore[arg-type]
    try:
        return type(module).forward(module, *args, **kwargs)
    finally:
        module._parameters.update(own)


class SplitForward:
    """What stands in for `module.forward`: an object and not a closure, so that copies and pickles of the module call
    their own.
    """

    style = ""  # as `interlace.report` has it; empty: no row
    plan_source = "styles"
    sequence_parallel = False

    def __init__(self, module: Any, group_name: str) -> None:
        self.module, self.group_name = module, group_name
        self.unsplit: dict[str, weakref.ref[nn.Parameter]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Without the references to unsplit parameters: they watch this model, not its copies."""
        return {**self.__dict__, "unsplit": {}}

    def named_parameters(self, recurse: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of the module itself, for `interlace.report`."""
        yield from self.module.named_parameters(recurse=recurse)

    def check_ties(self) -> None:
        """At the first call: ValueError when a module without a style still holds a parameter that was cut here."""
        if not self.unsplit or torch.compiler.is_compiling():
            return
        watched, self.unsplit = self.unsplit, {}
        for name, reference in watched.items():
            param = reference()
            if param is not None and _held_by_module(param):
                self.unsplit = watched
                raise ValueError(
                    f"interlace.styles: {name} of {type(self.module).__name__}{tuple(param.shape)} was tied to a "
                    "parameter of a module that got no style, so the two are no longer one; give that module a style "
                    "with the same placement (VocabEmbedding and ColumnLinear(gather_output=True) fit together)"
                )


def _held_by_module(param: Tensor) -> bool:
    for holder in gc.get_referrers(param):
        if not isinstance(holder, dict) or not any(value is param for value in holder.values()):
            continue
        for owner in gc.get_referrers(holder):
            if isinstance(owner, nn.Module) and owner._parameters is holder:
                return True
            if isinstance(owner, dict) and owner.get("_parameters") is holder:
                return True
    return False


def check_untouched(op: str, module: nn.Module) -> None:
    """Raise ValueError when `module` has a style already, or a forward of its own, or sharded parameters."""
    replaced = vars(module).get("forward")
    if isinstance(replaced, SplitForward):
        raise ValueError(f"{op}: this {type(module).__name__} has a style already; name it once in the plan")
    if replaced is not None:
        raise ValueError(
            f"{op}: the forward of this {type(module).__name__} was replaced by another wrapper; "
            "apply styles to the plain module first"
        )
    for name, param in module.named_parameters(recurse=False):
        if isinstance(param, DTensor):
            raise ValueError(
                f"{op}: {name} is sharded already ({param.placements}); apply styles before fully_shard and other "
                "wrappers"
            )


def distribute(
    op: str,
    module: nn.Module,
    placements: Mapping[str, Placement],
    mesh: DeviceMesh,
    src_data_rank: int | None,
    forward: SplitForward,
) -> None:
    """Make the named parameters of `module` DTensors and install `forward`. Tied parameters become one DTensor.

    Raises ValueError, before anything changes, when a tied parameter was cut another way.
    """
    params = {name: module._parameters.get(name) for name in placements}
    for name, param in params.items():
        known = getattr(param, _SPLIT_INTO, None)
        if known is not None and (known.placements, known.device_mesh) != ((placements[name],), mesh):
            raise ValueError(
                f"{op}: {name} {tuple(known.shape)} is tied to a parameter that was placed as {known.placements}, and "
                f"this style places it as {(placements[name],)}; give tied modules styles of one placement"
            )
    for name, param in params.items():
        if param is None:
            continue
        split = getattr(param, _SPLIT_INTO, None)
        if split is None:
            placed = _placed(param.detach(), placements[name], mesh, src_data_rank)
            split = nn.Parameter(placed, requires_grad=param.requires_grad)
            setattr(param, _SPLIT_INTO, split)
        module._parameters[name] = split
        forward.unsplit[name] = weakref.ref(param)
    module.forward = forward  # type: ignore[assignment]


def _placed(whole: Tensor, placement: Placement, mesh: DeviceMesh, src_data_rank: int | None) -> DTensor:
    """As distribute_tensor, but a shard owns its memory: a view would keep the whole alive, and deepcopy refuses it."""
    split = distribute_tensor(whole, mesh, [placement], src_data_rank=src_data_rank)
    part = split.to_local()
    if part.is_meta or part.untyped_storage().nbytes() == part.numel() * part.element_size():
        return split
    return DTensor.from_local(
        part.clone(), mesh, [placement], run_check=False, shape=split.shape, stride=split.stride()
    )
