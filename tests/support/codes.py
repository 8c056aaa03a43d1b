"""Codes of reasons, notes and problems that the source code gives or compares, read from its syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]

CODED: Final = ("Note", "Problem", "Reason")
"""Classes of sentences, whose first argument is the code."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Yield name and syntax tree of each module of the package."""
    for folder in ("sbonnx", "calib", "patterns"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            if not any(part.is_symlink() for part in file.parents if part.is_relative_to(ROOT)):
                yield str(file.relative_to(ROOT)), ast.parse(file.read_text())


def codes() -> dict[str, str]:
    """Return all codes, each with a place that gives it or compares with it."""
    found: dict[str, str] = {}
    for name, tree in modules():
        for part in ast.walk(tree):
            for value in (*_given(part), *_compared(part)):
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    found.setdefault(value.value, f"{name}:{value.lineno}")
    return found


def _given(part: ast.AST) -> list[ast.expr]:
    if isinstance(part, ast.Call):
        named = getattr(part.func, "id", "")
        if named in CODED:
            return part.args[:1]
        if ast.unparse(part.func) == "Reason.of":
            return part.args[1:2]
    return []


def _compared(part: ast.AST) -> list[ast.expr]:
    if isinstance(part, ast.Compare) and isinstance(part.left, ast.Attribute) and part.left.attr == "code":
        return part.comparators
    return []
