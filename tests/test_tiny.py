"""The size budget: what does not fit a screen is not read."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("sbonnx", "patterns", "calib", "tests", "examples", "benchmarks")
MAX_FILE = 400
MAX_FUNCTION = 60

KNOWN_LONG: frozenset[str] = frozenset()
"""Exceptions, "path" or "path: function", each with its reason beside it. The list only gets shorter."""


def sources() -> Iterator[Path]:
    """Every Python file once: `sbonnx/patterns` and `sbonnx/calib` are links to folders read themselves."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.resolve() == path:
                yield path


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Qualified name and number of lines of every function and method, those inside others too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}{node.name}"
            if not isinstance(node, ast.ClassDef):
                yield name, (node.end_lineno or node.lineno) - node.lineno + 1
            yield from functions(node, f"{name}.")
        else:
            yield from functions(node, prefix)


def measure() -> Iterator[tuple[str, int, int]]:
    """What is measured, its lines and its limit."""
    for path in sources():
        text, where = path.read_text(), path.relative_to(ROOT).as_posix()
        yield where, len(text.splitlines()), MAX_FILE
        for name, lines in functions(ast.parse(text)):
            yield f"{where}: {name}", lines, MAX_FUNCTION


def test_files_and_functions_stay_small() -> None:
    """400 lines a file, 60 a function. The list of exceptions may only get shorter."""
    too_long = {where: lines for where, lines, limit in measure() if lines > limit}
    new = {where: lines for where, lines in too_long.items() if where not in KNOWN_LONG}
    assert not new, "split it:\n" + "\n".join(f"  {where}: {lines} lines" for where, lines in new.items())
    assert too_long.keys() >= KNOWN_LONG, f"short now, take it off the list: {sorted(KNOWN_LONG - too_long.keys())}"


def test_the_measure_sees_the_tree() -> None:
    seen = {where for where, _, _ in measure()}
    assert {"sbonnx/spec.py", "sbonnx/spec.py: QParams.quantize", "tests/test_tiny.py: functions"} <= seen
    assert not any(where.startswith(("sbonnx/patterns/", "sbonnx/calib/")) for where in seen)


def test_no_drawers_for_everything() -> None:
    """A module is named after what it holds."""
    drawers = {"utils", "util", "helpers", "helper", "misc", "common", "manager"}
    wrong = [str(path.relative_to(ROOT)) for path in sources() if drawers & set(path.stem.split("_"))]
    assert not wrong, wrong
