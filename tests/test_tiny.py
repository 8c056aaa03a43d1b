"""The size budget: what does not fit a screen is not read."""

from __future__ import annotations

import ast
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from benchmarks.structure import OPENINGS, Module, docstrings
from benchmarks.structure import modules as read_modules

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("sbonnx", "patterns", "calib", "tests", "examples", "benchmarks")
MAX_FILE, LONG_FILE = 800, 400
MAX_FUNCTION, LONG_FUNCTION = 120, 60
"""Lines of which none may have more, and above which a warning asks whether the parts are one thought."""

MAX_MODULES = 15
LARGE_FOLDERS: dict[str, int] = {}
"""Folders with more modules. The numbers only get smaller."""

KNOWN_LONG: frozenset[str] = frozenset()
"""Exceptions, "path" or "path: function", each with its reason beside it. The list only gets shorter."""


def sources() -> Iterator[Path]:
    """Every Python file once: `sbonnx/patterns` and `sbonnx/calib` are links to folders read themselves."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.resolve() == path:
                yield path


@cache
def modules() -> tuple[Module, ...]:
    """Modules of the product. Parsed once, by the first test, and not when tests are collected."""
    return tuple(read_modules())


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Qualified name and number of lines of every function and method, those inside others too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}{node.name}"
            if not isinstance(node, ast.ClassDef):
                yield name, (node.end_lineno or node.lineno) - node.lineno + 1
            yield from functions(node, f"{name}.")
        elif not isinstance(node, ast.expr):
            yield from functions(node, prefix)


@cache
def measure() -> list[tuple[str, int, int, int]]:
    """(place, lines, length that is warned of, limit) of files and functions."""
    found = []
    trees = {module.path: module.tree for module in modules()}
    for path in sources():
        text, where = path.read_text(), path.relative_to(ROOT).as_posix()
        found.append((where, len(text.splitlines()), LONG_FILE, MAX_FILE))
        tree = trees.get(path) or ast.parse(text)
        found += [(f"{where}: {name}", lines, LONG_FUNCTION, MAX_FUNCTION) for name, lines in functions(tree)]
    return found


def test_files_and_functions_stay_small() -> None:
    """The list of exceptions may only get shorter."""
    found = measure()
    too_long = {where: lines for where, lines, _, limit in found if lines > limit}
    new = {where: lines for where, lines in too_long.items() if where not in KNOWN_LONG}
    assert not new, "split it:\n" + "\n".join(f"  {where}: {lines} lines" for where, lines in new.items())
    assert too_long.keys() >= KNOWN_LONG, f"short now, take it off the list: {sorted(KNOWN_LONG - too_long.keys())}"
    for where, lines, length, _ in found:
        if lines > length:
            warnings.warn(f"{where} has {lines} lines: is it one thought?", stacklevel=1)


def test_folders_stay_small() -> None:
    counts = Counter(module.folder for module in modules() if not module.is_package)
    large = {folder: count for folder, count in counts.items() if count > MAX_MODULES}
    assert large == LARGE_FOLDERS, "split the folder, or lower its number here"


def test_docstrings_begin_with_what_they_describe() -> None:
    """A verb, or a noun of the field."""
    wrong = [f"{place}: {text[:50]}" for place, text in docstrings(list(modules())) if text.startswith(OPENINGS)]
    assert not wrong, "\n".join(wrong)


def test_the_measure_sees_the_tree() -> None:
    seen = {where for where, _, _, _ in measure()}
    assert {"sbonnx/spec.py", "sbonnx/spec.py: QParams.quantize", "tests/test_tiny.py: functions"} <= seen
    assert not any(where.startswith(("sbonnx/patterns/", "sbonnx/calib/")) for where in seen)


def test_no_drawers_for_everything() -> None:
    """A module is named after what it holds."""
    drawers = {"utils", "util", "helpers", "helper", "misc", "common", "manager"}
    wrong = [str(path.relative_to(ROOT)) for path in sources() if drawers & set(path.stem.split("_"))]
    assert not wrong, wrong
