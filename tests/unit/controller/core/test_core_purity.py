"""What the core can reach: no module and no builtin that reads a clock, makes randomness or does I/O.

import-linter refuses what is known to be impure, through whatever it is imported by. Here is the other half: of what is
not this project's own the core imports only what is named below, so that something new has to be thought about.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import everstep_controller.core

CORE = Path(everstep_controller.core.__file__).parent
PURE = {
    "__future__",
    "bisect",
    "collections",
    "enum",
    "functools",
    "heapq",
    "itertools",
    "math",
    "operator",
    "types",
    "typing",
}
PURE |= {"msgspec", "xxhash"}
OWN = {"everstep_controller.core", "everstep"}
IMPURE_BUILTINS = {"open", "print", "input", "exec", "eval", "compile", "__import__", "breakpoint", "globals", "vars"}
UNSTEADY_BUILTINS = {"id", "hash"}
"""Another answer in each process: memory addresses, and hashes of texts."""


def imported(tree: ast.AST) -> Iterator[str]:
    """Modules, as they are named."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def called(tree: ast.AST) -> Iterator[str]:
    """Functions that are called, or handed to another that may call them, by a bare name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            handed = [node.func, *node.args, *(keyword.value for keyword in node.keywords)]
            yield from (argument.id for argument in handed if isinstance(argument, ast.Name))


def impurities(source: str) -> list[str]:
    """Return names in a module's source that could make two runs differ, or do I/O."""
    tree = ast.parse(source)
    modules = [
        name
        for name in imported(tree)
        if name.partition(".")[0] not in PURE and not any(name == own or name.startswith(own + ".") for own in OWN)
    ]
    local = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    local |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return modules + [name for name in called(tree) if name in (IMPURE_BUILTINS | UNSTEADY_BUILTINS) - local]


@pytest.mark.parametrize("file", sorted(CORE.rglob("*.py")), ids=lambda file: file.stem)
def test_core_imports_only_pure_modules(file: Path) -> None:
    assert impurities(file.read_text()) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import secrets", ["secrets"]),
        ("from datetime import datetime", ["datetime"]),
        ("def late() -> None:\n    import uuid", ["uuid"]),
        ("import os.path", ["os.path"]),
        ("from everstep_controller.store import tables", ["everstep_controller.store"]),
        ("from ..store import tables", ["..store"]),
        ("open('/etc/passwd')", ["open"]),
        ("sorted(names, key=hash)", ["hash"]),
        ("{id(one): one}", ["id"]),
        ("def of(id: str) -> str:\n    return look(id)", []),
        ("from collections.abc import Mapping\nimport everstep_controller.core.state", []),
    ],
)
def test_purity_check_finds_impure_imports(source: str, found: list[str]) -> None:
    assert impurities(source) == found
