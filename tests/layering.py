"""Reads the source tree and reports what breaks the floors: which file may import or include which, and a few
rules about the text itself. No part of the package is imported, so a broken build is checked as well.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

# One way down: a module imports modules of lower floors, and others of its own folder.
PYTHON_FLOORS = {
    "config": 0,
    "_C": 0,
    "_native": 1,
    "checks": 2,
    "errors": 2,
    "hardware": 2,
    "limits": 2,
    "packing": 3,
    "paths": 2,
    "symmetric_memory": 3,
    "heuristics": 3,
    "reference": 3,
    "decomposed": 4,
    "device": 4,
    "groups": 4,
    "composed": 5,
    "cuda_dispatch": 5,
    "random": 5,
    "windows": 5,
    "memory": 6,
    "ops": 6,
    "counting": 7,
    "functional": 7,
    "modules": 8,
    "checkpoint": 9,
    "context_parallel": 9,
    "styles": 9,
    "symm_mem_ops": 9,
    "plan": 9,
    "parallelize": 10,
    "planner": 10,
    "hf": 11,
    "pretrained": 11,
    "bench": 12,
    "tune": 12,
    "doctor": 12,
    "families": 13,
    "demo": 13,
    "train": 13,
    "cli": 14,
}
PACKAGE_FACE = "__init__"  # may import everything up to hf: whoever imports interlace gets it
PACKAGE_FACE_FLOOR = 12

# Folder or file of csrc -> the folders whose headers it may include. The longest matching name decides.
CSRC_INCLUDES = {
    "core": {"core"},
    "runtime": {"core", "runtime"},
    "cpu": {"core", "runtime", "cpu"},
    "ops.cpp": {"core", "runtime", "cpu"},
    "bindings.cpp": {"core", "runtime"},
    "cuda/kernels": {"core", "cuda/kernels", "emu"},
    "cuda/host": {"core", "runtime", "cuda/kernels", "cuda/host"},
    "emu": {"core", "cuda/kernels", "emu"},
}
TORCH_ALLOWED = {"cpu", "ops.cpp", "cuda/host"}  # and there the stable ABI only
STABLE_TORCH = re.compile(r"torch/(csrc/stable/|headeronly/|csrc/inductor/aoti_torch/c/)")
ANY_TORCH = re.compile(r"(torch|ATen|c10|caffe2)/")

MAXIMUM_LINES = 400
SOURCE_SUFFIXES = {".py", ".h", ".hpp", ".cpp", ".cu", ".cuh", ".inl", ".cmake", ".pml"}
SOURCE_FOLDERS = ("python", "csrc", "build_backend", "cmake", "tests", "benchmarks", "examples")


def violations(root: Path) -> list[str]:
    """Every broken rule in the tree at root, as `file:line: what is wrong`."""
    found = [*_python_imports(root), *_includes(root)]
    for path in source_files(root):
        name = path.relative_to(root).as_posix()
        text = path.read_bytes().decode("utf-8", errors="replace")
        found += _text_rules(name, text)
    return found


def source_files(root: Path) -> list[Path]:
    """The source files the rules are about."""
    inside = [p for folder in SOURCE_FOLDERS for p in (root / folder).rglob("*")]
    return sorted(p for p in inside if p.suffix in SOURCE_SUFFIXES and p.is_file())


def _text_rules(name: str, text: str) -> Iterator[str]:
    lines = text.splitlines()
    if len(lines) > MAXIMUM_LINES:
        yield f"{name}:{len(lines)}: longer than {MAXIMUM_LINES} lines; split it by idea"
    for number, line in enumerate(lines, 1):
        if not line.isascii():
            yield f"{name}:{number}: not ASCII"
        product = name.startswith(("python/interlace/", "csrc/")) and name != "python/interlace/config.py"
        if product and re.search(r"\bos\.(environ|getenv|putenv)\b|\bgetenv\s*\(|import environ", line):
            yield f"{name}:{number}: reads the environment; only python/interlace/config.py does"


def _python_imports(root: Path) -> Iterator[str]:
    package = root / "python" / "interlace"
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        here = path.relative_to(package).with_suffix("").parts[0]
        floor = PACKAGE_FACE_FLOOR if here == PACKAGE_FACE else PYTHON_FLOORS.get(here)
        if floor is None:
            yield f"{name}:1: has no floor; give {here} one in tests/layering.py"
            continue
        for line, target in _imported_modules(path, package):
            if target == here:
                continue
            if target == PACKAGE_FACE:
                if floor < PACKAGE_FACE_FLOOR:
                    yield f"{name}:{line}: imports the package itself, which imports this file"
            elif target not in PYTHON_FLOORS:
                yield f"{name}:{line}: imports interlace.{target}, which has no floor in tests/layering.py"
            elif PYTHON_FLOORS[target] >= floor:
                above = PYTHON_FLOORS[target]
                yield f"{name}:{line}: {here} (floor {floor}) imports {target} (floor {above})"


def _imported_modules(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """(line, first name under interlace) of each import of our own; the package itself is PACKAGE_FACE."""
    folder = path.parent.relative_to(package.parent).parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] == "interlace":
                    yield node.lineno, parts[1] if parts[1:] else PACKAGE_FACE
        elif isinstance(node, ast.ImportFrom):
            base = list(folder[: len(folder) - node.level + 1]) if node.level else []
            parts = base + (node.module.split(".") if node.module else [])
            if parts[:1] != ["interlace"]:
                continue
            if parts[1:]:
                yield node.lineno, parts[1]
            else:
                for alias in node.names:
                    known = alias.name in PYTHON_FLOORS or _is_module(package, alias.name)
                    yield node.lineno, alias.name if known else PACKAGE_FACE


def _is_module(package: Path, name: str) -> bool:
    return (package / f"{name}.py").is_file() or (package / name / "__init__.py").is_file()


def _includes(root: Path) -> Iterator[str]:
    csrc = root / "csrc"
    for path in sorted(csrc.rglob("*")):
        if path.suffix not in {".h", ".hpp", ".cpp", ".cu", ".cuh", ".inl"}:
            continue
        name = path.relative_to(root).as_posix()
        here = _place(path.relative_to(csrc).as_posix())
        if here is None:
            yield f"{name}:1: its folder has no floor; give it one in tests/layering.py"
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            match = re.match(r"\s*#\s*include\s*([<\"])([^>\"]+)[>\"]", line)
            if match and (wrong := _wrong_include(here, match[1], match[2], path, csrc)):
                yield f"{name}:{number}: {wrong}"


def _wrong_include(here: str, bracket: str, header: str, path: Path, csrc: Path) -> str | None:
    if ANY_TORCH.match(header):
        if here not in TORCH_ALLOWED:
            return f"{here} must not include torch ({header})"
        if not STABLE_TORCH.match(header):
            return f"{header} is outside torch's stable ABI"
        return None
    if here == "core" and re.match(r"cuda|nccl", header):
        return f"core must not include CUDA ({header})"
    if bracket == "<":
        return None
    if ".." in header.split("/"):
        return f"{header}: name headers from csrc down, not with .."
    beside = path.parent / header
    target = _place((beside if beside.is_file() else csrc / header).relative_to(csrc).as_posix())
    if target not in CSRC_INCLUDES[here]:
        return f"{here} must not include {target or 'unknown'} ({header})"
    return None


def _place(name: str) -> str | None:
    fitting = [place for place in CSRC_INCLUDES if name == place or name.startswith(place + "/")]
    return max(fitting, key=len, default=None)
