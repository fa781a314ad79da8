"""Who uses the weight of a module otherwise than by calling the module: then a shard in its place would be wrong."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping

from torch import nn

from .source import METADATA, function_of

__all__ = ["looks_up_by_super", "why_weight_is_read"]


def why_weight_is_read(modules: Mapping[str, nn.Module], children: Collection[str]) -> str:
    """Why it is not certain that the weights of modules named `children` are used by calling these only; "" if so.

    Reads the forward of every module of the model and the methods that it calls. `x.weight.dtype` and the like are
    no use of the values.
    """
    seen: set[type[nn.Module]] = set()
    for name, module in modules.items():
        if type(module) in seen or type(module).__module__.startswith("torch.nn."):
            continue
        seen.add(type(module))
        functions = list(_reached(module))
        if None in functions:
            return f"{name or 'the model'}: the source of {type(module).__name__}.forward is not there to be read"
        for function in functions:
            child = next((c for c in _weights_read(function) if c in children), "")
            if child:
                return f"{type(module).__name__}.{function.name} reads {child}.weight without calling {child}"
    return ""


def looks_up_by_super(embedding: nn.Embedding) -> bool:
    """True when the forward of a subclass gets its rows from `super().forward` and reads no weight itself."""
    if type(embedding).forward is nn.Embedding.forward:
        return True
    function = function_of(type(embedding).forward)
    if function is None:
        return False
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    by_super = any(isinstance(f, ast.Attribute) and f.attr == "forward" and _is_super(f.value) for f in calls)
    others = {f.attr for f in calls if isinstance(f, ast.Attribute)} & {"embedding", "index_select"}
    return by_super and not others and not any(True for _ in _values_of_own_weight(function))


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def _reached(module: nn.Module) -> Iterator[ast.FunctionDef | None]:
    """The forward and the methods that it calls; None for one without source."""
    if "forward" in vars(module):
        yield None
        return
    waiting, seen = ["forward"], set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        function = function_of(getattr(type(module), name))
        yield function
        if function is None:
            return
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                called = node.func
                if isinstance(called.value, ast.Name) and called.value.id == "self":
                    member = vars(type(module)).get(called.attr)
                    waiting += [called.attr] if callable(member) else []


def _of_weight(function: ast.FunctionDef) -> Iterator[ast.Attribute]:
    """Every `X.weight` whose values are used."""
    nodes = list(ast.walk(function))
    described = {
        id(node.value) for node in nodes if isinstance(node, ast.Attribute) and node.attr in METADATA
    }
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr == "weight" and id(node) not in described:
            yield node


def _weights_read(function: ast.FunctionDef) -> Iterator[str]:
    for node in _of_weight(function):
        if isinstance(node.value, ast.Attribute):
            yield node.value.attr
        elif isinstance(node.value, ast.Name):
            yield node.value.id


def _values_of_own_weight(function: ast.FunctionDef) -> Iterator[ast.Attribute]:
    return (node for node in _of_weight(function) if isinstance(node.value, ast.Name))
