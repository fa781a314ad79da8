"""Memory of one step by category, as torch's MemTracker sees it: every storage, whatever allocated it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

__all__ = ["Mark", "sharded_states", "tracked_step"]

Mark = Callable[[], None]

# torch's categories -> the planner's. Buffers are not predicted.
_NAMES = {
    "Parameter": "parameters",
    "Buffer": "buffers",
    "Gradient": "gradients",
    "Optstate": "optimizer",
    "Activation": "activations",
    "Temp": "temporary",
    "Other": "other",
}


def tracked_step(
    modules: list[nn.Module], optimizer: torch.optim.Optimizer, step: Callable[[Mark], object]
) -> dict[str, int]:
    """Bytes by category, each the largest of the moments `step` marks, and "peak": the largest total of the step.

    step runs one step whose states exist already and calls the mark it is given where a micro-batch turns from forward
    to backward (all its activations are alive) and where the gradients are complete.
    """
    tracker = _tracker()
    tracker.track_external(*modules, getattr(optimizer, "optim", optimizer))  # ZeRO-1 wraps its share's
    found: dict[str, int] = dict.fromkeys(_NAMES.values(), 0)

    def mark() -> None:
        for name, size in _by_category(tracker.get_tracker_snapshot("current")).items():
            found[name] = max(found[name], size)

    # torch's tracker keeps statistics of modules for one forward; this hook runs before its own and clears them
    roots = {id(module) for module in modules}
    handle = register_module_forward_pre_hook(lambda module, _: _forget(tracker, module, roots))
    try:
        with warnings.catch_warnings(), tracker:
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            step(mark)
    finally:
        handle.remove()
    return found | {"peak": sum(_by_category(tracker.get_tracker_snapshot("peak")).values())}


def sharded_states(
    modules: list[nn.Module], optimizer: torch.optim.Optimizer, step: Callable[[Mark], object]
) -> dict[str, int]:
    """Bytes of this rank's shards of parameters, gradients and optimizer states under fully_shard.

    torch's MemTracker does not know that module: it takes gathered parameters for activations.
    """
    found = dict.fromkeys(("parameters", "gradients", "optimizer"), 0)

    def mark() -> None:
        held = [parameter for module in modules for parameter in module.parameters()]
        states = [value for state in optimizer.state.values() for value in state.values()]
        for name, tensors in (
            ("parameters", held),
            ("gradients", [parameter.grad for parameter in held]),
            ("optimizer", states),
        ):
            size = sum(_local(tensor).nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
            found[name] = max(found[name], size)

    step(mark)
    return found


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _tracker() -> Any:
    from torch.distributed._tools.mem_tracker import MemTracker

    class Tracker(MemTracker):
        """Leaves out hooks on stand-ins: sequence parallelism puts a computed tensor where a parameter was."""

        def _track_module_params_and_buffers(
            self, module: nn.Module, install_grad_hooks: bool = True
        ) -> tuple[int, int]:
            leaves = all(parameter.is_leaf for parameter in module.parameters())
            return super()._track_module_params_and_buffers(module, install_grad_hooks and leaves)

    return Tracker()


def _forget(tracker: Any, module: nn.Module, roots: set[int]) -> None:
    if id(module) in roots:
        for part in module.modules():
            tracker.memory_tracking.pop(part, None)


def _by_category(snapshot: dict[torch.device, dict[str, int]]) -> dict[str, int]:
    sums = dict.fromkeys(_NAMES.values(), 0)
    for categories in snapshot.values():
        for category, size in categories.items():
            name = _NAMES.get(str(getattr(category, "value", category)))
            if name:
                sums[name] += int(size)
    return sums
