"""Whether a feed-forward block works on every intermediate feature by itself, as far as names and source can tell."""

from __future__ import annotations

import ast

from torch import nn

from .source import function_of

__all__ = ["why_not_elementwise"]

# what mixes the features of a token: with a part of them it gives something else
MIXING = {
    "amax", "argmax", "argsort", "cumprod", "cumsum", "group_norm", "kthvalue", "layer_norm", "log_softmax",
    "logsumexp", "matmul", "max", "mean", "median", "min", "norm", "normalize", "quantile", "rms_norm", "roll",
    "softmax", "sort", "std", "sum", "topk", "var",
}  # fmt: skip
MIXING_MODULES = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.Softmax, nn.LogSoftmax)


def why_not_elementwise(module: nn.Module, ins: tuple[str, ...], out: str) -> str:
    """What between the linears `ins` and `out`, children of `module`, sees all intermediate features; "" if nothing.

    Looks at the source of the forward: calls between the two, and methods that these calls reach.
    """
    for found in _bodies(module):
        places = [_place(call) for call in found if _child(call) in ins]
        ends = [_place(call) for call in found if _child(call) == out]
        if places and ends:
            break
    else:
        return f"the forward of {type(module).__name__} is not seen to call {', '.join(ins)} and {out}"
    between = [call for call in found if min(places) <= _place(call) <= max(ends)]
    for call in between:
        why = _why(module, call, {*ins, out})
        if why:
            return why
    return ""


def _bodies(module: nn.Module) -> list[list[ast.Call]]:
    """The calls in the forward, and in every method of the module that the forward names."""
    forward = None if "forward" in vars(module) else function_of(type(module).forward)
    if forward is None:
        return []
    named = {node.attr for node in ast.walk(forward) if isinstance(node, ast.Attribute)}
    methods = [function_of(vars(type(module)).get(name)) for name in sorted(named - {"forward"})]
    functions = [forward, *(method for method in methods if method is not None)]
    return [[node for node in ast.walk(f) if isinstance(node, ast.Call)] for f in functions]


def _why(module: nn.Module, call: ast.Call, linears: set[str]) -> str:
    child = _child(call)
    if not child:
        return f"its forward calls {_last(call)}" if _last(call) in MIXING else ""
    if child in linears:
        return ""
    called = getattr(module, child, None)
    if isinstance(called, nn.Module):
        mixing = next((part for part in called.modules() if isinstance(part, MIXING_MODULES)), None)
        if mixing is not None or any(param.numel() > 1 for param in called.parameters()):
            return f"{child} ({type(called).__name__}) sees all intermediate features"
        return ""
    function = function_of(getattr(type(module), child, None))
    names = (
        set()
        if function is None
        else {_last(node) for node in ast.walk(function) if isinstance(node, ast.Call)}
    )
    mixed = sorted(names & MIXING)
    return f"its method {child} calls {', '.join(mixed)}" if mixed else ""


def _last(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _child(call: ast.Call) -> str:
    """NAME of a call self.NAME(..)."""
    function = call.func
    if not isinstance(function, ast.Attribute) or not isinstance(function.value, ast.Name):
        return ""
    return function.attr if function.value.id == "self" else ""


def _place(call: ast.Call) -> tuple[int, int]:
    """Where the call ends: arguments are computed before it."""
    return call.end_lineno or 0, call.end_col_offset or 0
