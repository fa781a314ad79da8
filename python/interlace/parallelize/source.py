"""What a module's forward reads, from its source: the proof that splitting heads or features leaves it
right.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import FunctionType
from typing import Any

from torch import nn

__all__ = ["METADATA", "ForwardReads", "calls", "forward_reads", "function_of", "splits_in_halves"]

METADATA = ("shape", "dtype", "device", "ndim")


@dataclass
class ForwardReads:
    """Names read as `self.NAME` and `self.config.NAME`, the forward's parameters, and what children are
    called with.

    `inputs` maps a child to the names of the variables it is called with, where those are plain names.
    `other_uses` are the names used elsewhere than as the argument of a child or for their shape, dtype and device;
    `widths` the names of last sizes (`a, b, width = x.shape`), `loads` all names that are read.
    """

    attributes: set[str] = field(default_factory=set)
    config: set[str] = field(default_factory=set)
    parameters: tuple[str, ...] = ()
    inputs: dict[str, set[str]] = field(default_factory=dict)
    other_uses: set[str] = field(default_factory=set)
    widths: set[str] = field(default_factory=set)
    loads: set[str] = field(default_factory=set)

    def input_of(self, children: Sequence[str], beside: Collection[str] = ()) -> str:
        """The one name that all `children` are called with, not counting those `beside`; "" when there is none."""
        names = set().union(*(self.inputs.get(child, {""}) for child in children)) - set(beside)
        return names.pop() if len(names) == 1 else ""

    def only_input(self, children: Sequence[str], beside: Collection[str] = ()) -> str:
        """As `input_of`, when it is a parameter of the forward whose values nothing but the children use."""
        name = self.input_of(children, beside)
        return name if name in self.parameters and name not in self.other_uses else ""


def forward_reads(module: nn.Module) -> ForwardReads | None:
    """What the forward of `module`, and the methods of its class that it calls, read; None when there is no
    source.
    """
    if "forward" in vars(module):
        return None  # replaced on this instance (a wrapper's hook): what runs is not the class's source
    return _class_reads(type(module))


@cache  # the layers of a stack are of one class; callers only look at what they get
def _class_reads(kind: Any) -> ForwardReads | None:
    reads = ForwardReads()
    seen: set[str] = set()
    waiting = ["forward"]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        function = function_of(getattr(kind, name))
        if function is None:
            return None
        visitor = _Reader(function, reads)
        if name == "forward":
            reads.parameters = tuple(arg.arg for arg in (*function.args.args[1:], *function.args.kwonlyargs))
        for statement in function.body:
            visitor.visit(statement)
        waiting += [n for n in reads.attributes if _is_method(getattr(kind, n, None))]
    reads.attributes -= seen
    return reads


def _is_method(member: Any) -> bool:
    return callable(member) and inspect.isfunction(inspect.unwrap(member))


def function_of(member: Any) -> ast.FunctionDef | None:
    """The parsed source of a method, without its decorators' wrappers; None when there is none. Not to be changed."""
    function = inspect.unwrap(member) if callable(member) else None
    return _parsed(function) if inspect.isfunction(function) else None


@cache  # the layers of a stack are of one class: without it half of the time that a plan takes goes here
def _parsed(function: FunctionType) -> ast.FunctionDef | None:
    try:
        source = textwrap.dedent(inspect.getsource(function))
        return next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    except (OSError, TypeError, SyntaxError, StopIteration):
        return None


def calls(module: nn.Module, names: Collection[str]) -> set[str]:
    """Which of the methods and functions `names` the forward of `module` calls itself; all of them without source."""
    function = None if "forward" in vars(module) else function_of(type(module).forward)
    if function is None:
        return set(names)
    called = {_last_name(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
    return called & set(names)


def splits_in_halves(module: nn.Module) -> bool:
    """True when the forward cuts something by `chunk(2, ..)` and nothing with a stride: gate and up, one behind the
    other.
    """
    function = None if "forward" in vars(module) else function_of(type(module).forward)
    if function is None:
        return False
    nodes = list(ast.walk(function))
    strides = [node for node in nodes if isinstance(node, ast.Slice) and node.step is not None]
    halves = [
        node
        for node in nodes
        if isinstance(node, ast.Call) and _last_name(node.func) == "chunk" and _is_two(node)
    ]
    return bool(halves) and not strides


def _is_two(call: ast.Call) -> bool:
    given = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "chunks")]
    return any(isinstance(value, ast.Constant) and value.value == 2 for value in given)


def _last_name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


class _Reader(ast.NodeVisitor):
    def __init__(self, function: ast.FunctionDef, reads: ForwardReads) -> None:
        self.self_name = function.args.args[0].arg if function.args.args else "self"
        self.reads = reads

    def _is_self(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id == self.self_name

    def visit_Attribute(self, node: ast.Attribute) -> None:
        value = node.value
        if self._is_self(value):
            self.reads.attributes.add(node.attr)
            return
        if isinstance(value, ast.Attribute) and self._is_self(value.value) and value.attr == "config":
            self.reads.config.add(node.attr)
            return
        if isinstance(value, ast.Name) and node.attr in METADATA:
            return
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function, arguments = node.func, node.args
        if isinstance(function, ast.Attribute) and self._is_self(function.value):
            self.reads.attributes.add(function.attr)
            if len(arguments) == 1 and isinstance(arguments[0], ast.Name) and not node.keywords:
                self.reads.inputs.setdefault(function.attr, set()).add(arguments[0].id)
                return
        elif (
            isinstance(function, ast.Attribute)
            and function.attr == "size"
            and isinstance(function.value, ast.Name)
        ):
            arguments = []
        else:
            self.visit(function)
        for part in (*arguments, *(keyword.value for keyword in node.keywords)):
            self.visit(part)

    def visit_Assign(self, node: ast.Assign) -> None:
        value = node.value.func if isinstance(node.value, ast.Call) else node.value
        is_shape = isinstance(value, ast.Attribute) and value.attr in ("shape", "size")
        for target in node.targets:
            if is_shape and isinstance(target, ast.Tuple) and len(target.elts) == 3:
                self.reads.widths |= {last.id for last in target.elts[2:] if isinstance(last, ast.Name)}
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        self.reads.other_uses.add(node.id)
        if isinstance(node.ctx, ast.Load):
            self.reads.loads.add(node.id)
