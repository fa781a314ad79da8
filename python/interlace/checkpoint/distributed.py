"""A split model and its optimizer as torch.distributed.checkpoint saves and loads them, in any number of shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..modules.held import local_part
from ..modules.layout import ParameterLayout
from .entries import Entry, entries_of, layouts_by_tensor, original_name, rank_of

__all__ = ["OptimizerState", "distributed_state_dict"]

OP = "distributed_state_dict"


def distributed_state_dict(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """What torch.distributed.checkpoint.save writes, and load reads in place, of a split model.

    Names and shapes are those of the unsplit model, whatever its layouts (uneven heads, shared kv heads, packed,
    fully_shard on top), so a checkpoint can be loaded into another number of ranks, into the unsplit model, and one
    of the unsplit model into a split one:

        dcp.save(distributed_state_dict(model, optimizer), checkpoint_id=path)
        dcp.load(distributed_state_dict(other, its_optimizer), checkpoint_id=path)  # filled in place

    Without optimizer: the entries of model.state_dict(). With it: {"model": those, "optimizer": an OptimizerState},
    as torch's get_state_dict(model, optimizer) under these keys. Holds no copies. A part of a tensor that several
    ranks hold is written by the first of them. Extra state of modules is written; after a load it is in the dict.
    Raises ValueError for a model on the meta device (call `materialise`) and for optimizer state that is
    neither of the parameter's shape nor one number.
    """
    entries = entries_of(model)
    for entry in entries:
        if isinstance(entry.value, Tensor) and entry.value.is_meta:
            raise ValueError(
                f"{OP}: {entry.name} is on the meta device; call interlace.checkpoint.materialise first"
            )
    state = {entry.name: _value(entry) for entry in entries}
    if optimizer is None:
        return state
    return {"model": state, "optimizer": OptimizerState(model, optimizer)}


def _value(entry: Entry) -> Any:
    if not isinstance(entry.value, Tensor):
        return entry.value
    return _pieces(entry.value, entry.layout)


def _pieces(tensor: Tensor, layout: ParameterLayout | None) -> Tensor:
    if layout is None:
        return tensor.detach()
    from .pieces import PiecesOfTensor  # loads torch.distributed.checkpoint, as whoever calls this does

    return PiecesOfTensor.of(tensor, layout, rank_of(layout))


class OptimizerState:
    """The optimizer of a split model, a Stateful of torch.distributed.checkpoint: state and settings by name.

    An optimizer that made no step yet gets its state when asked for it, as torch's own get_optimizer_state_dict does:
    there must be memory into which to load.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """{"state": {name: {"exp_avg": ..}}, "param_groups": [{"lr": .., "params": [names]}]}, without copies."""
        names, layouts = self._names(), layouts_by_tensor(self.model)
        if not self.optimizer.state:
            _initialise(self.optimizer)
        state: dict[str, dict[str, Any]] = {}
        for param, values in self.optimizer.state.items():
            name = names[param]
            state[name] = {
                key: _state_value(f"{name}: {key}", value, param, layouts.get(id(param)))
                for key, value in values.items()
            }
        groups = [
            {**group, "params": [names[param] for param in group["params"]]}
            for group in self.optimizer.param_groups
        ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over settings and numbers; tensors were filled in place."""
        names = {name: param for param, name in self._names().items()}
        for name, values in state_dict["state"].items():
            for key, value in values.items():
                if not isinstance(value, Tensor):
                    self.optimizer.state[names[name]][key] = value
        for group, loaded in zip(self.optimizer.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in loaded.items() if key != "params"})

    def _names(self) -> dict[Tensor, str]:
        clean = original_name(self.model)
        names: dict[Tensor, str] = {param: clean(name) for name, param in self.model.named_parameters()}
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if param not in names:
                    raise ValueError(
                        f"{OP}: the optimizer has a parameter {list(param.shape)} that the model has not; make the "
                        "optimizer after parallelize and after loading into a model on the meta device"
                    )
        return names


def _state_value(what: str, value: Any, param: Tensor, layout: ParameterLayout | None) -> Any:
    if not isinstance(value, Tensor) or layout is None:
        return value
    if value.shape == param.shape:
        return _pieces(value, layout)
    if value.dim() == 0:
        return value
    raise ValueError(
        f"{OP}: state {what} has shape {list(value.shape)}, its parameter here {list(param.shape)}; what is neither of "
        "this shape nor one number cannot be put together for another split"
    )


@torch.no_grad()
def _initialise(optimizer: Optimizer) -> None:
    """Make the state by a step without effect: gradients of zero, no learning rate, no decay."""
    settings = [dict(group) for group in optimizer.param_groups]
    params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    grads = [param.grad for param in params]
    for param in params:
        param.grad = torch.zeros_like(param)
    for group in optimizer.param_groups:
        for key in ("lr", "weight_decay"):
            if key in group:
                group[key] = torch.zeros_like(group[key]) if isinstance(group[key], Tensor) else 0.0
    try:
        optimizer.step()
    finally:
        for group, before in zip(optimizer.param_groups, settings, strict=True):
            group.update(before)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
    for values in optimizer.state.values():
        step = values.get("step")
        if isinstance(step, Tensor):
            local_part(step).zero_()
        elif step is not None:
            values["step"] = 0
