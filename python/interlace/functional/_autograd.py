"""How gradients hang under the ops: kernels of the dispatcher's Autograd key, written with autograd.Function.

Going through the Autograd key (not calling the Function from user code) keeps one op in the graph, so torch.compile,
selective checkpointing and profilers see `interlace::gemm_all_reduce` and nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import _C, Tensor

from ..errors import translated
from ..ops import routed
from ..paths import backend, chosen_backend

__all__ = [
    "below_autograd",
    "call",
    "goes_as_forward",
    "is_recorded",
    "register",
    "remember_backend",
    "requires_grad",
    "will_need",
]

_LIB = torch.library.Library("interlace", "IMPL")


def below_autograd(op: torch._ops.OpOverload, keyset: Any, group_name: str, *args: Any) -> Any:
    """Call the op's own kernel, under the Autograd key, or its twin in torch.distributed (see `routed`).

    Below view tracking too: a result that a kernel reshaped is no view to its reader, who may change it in place.
    """
    try:
        with _C._AutoDispatchBelowADInplaceOrView():
            return routed(op, group_name, args).redispatch(keyset & _C._after_ADInplaceOrView_keyset, *args)
    except RuntimeError as error:
        raise translated(error) from None


def call(op: torch._ops.OpOverload, group_name: str, *args: Any) -> Any:
    """Call an op. Without gradients the Autograd kernel, which is Python, is skipped: that is most of the overhead."""
    try:
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return op(*args)
        with _C._AutoDispatchBelowAutograd():
            return routed(op, group_name, args)(*args)
    except RuntimeError as error:
        raise translated(error) from None


def requires_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def is_recorded() -> bool:
    """Within a backward: is it recorded too (create_graph), for gradients of gradients? Never while tracing."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def remember_backend(ctx: Any, x: Tensor) -> None:
    """In a forward: backward of CUDA tensors runs on a thread of the engine; `interlace.backend` is unknown there."""
    if x.is_cuda:
        ctx.backend = chosen_backend()


def goes_as_forward(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward whose ops go the way that `interlace.backend` said at the forward, when that was remembered."""

    @functools.wraps(backward)
    def wrapped(ctx: Any, *grads: Any) -> Any:
        choice = getattr(ctx, "backend", None)
        if choice is None or choice == chosen_backend():
            return backward(ctx, *grads)
        with backend(choice):
            return backward(ctx, *grads)

    return wrapped


def register(name: str, kernel: Callable[..., Any]) -> None:
    """Make `kernel(keyset, *op arguments)` the op's kernel for the Autograd key."""
    _LIB.impl(name, kernel, "Autograd", with_keyset=True)


def will_need(ctx: Any, tensors: Sequence[Tensor | None]) -> list[bool]:
    """For the Function's tensor inputs, in order: will this run of the engine use the gradient?

    Pipelines with zero-bubble schedules ask for input gradients and weight gradients in two runs; needs_input_grad
    says yes to both in both, and each collective would run twice. The engine itself knows better.
    """
    edges = iter(ctx.next_functions)
    needed = []
    for tensor in tensors:
        if tensor is None:
            needed.append(False)
            continue
        node = next(edges)[0]
        needed.append(node is not None and _engine_runs(node))
    return needed


def _engine_runs(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        # a leaf captured by autograd.grad, or a call outside the engine (compiled autograd): the gradient is wanted
        return True
