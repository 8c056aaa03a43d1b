"""What a backend does is decided by its objects: its name is compared nowhere outside `sbonnx.backends`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from sbonnx.backends import BACKENDS

ROOT = Path(__file__).resolve().parents[2]
HOMES = ("sbonnx", "calib", "patterns")


def compared(tree: ast.AST) -> Iterator[ast.expr]:
    """The operands of comparisons and of `startswith`, those of tuples and sets one by one."""
    for node in ast.walk(tree):
        operands: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "startswith":
            operands = [node.func.value, *node.args]
        if any(says_backend(operand) for operand in operands):
            for operand in operands:
                yield from operand.elts if isinstance(operand, ast.Tuple | ast.Set | ast.List) else [operand]


def says_backend(operand: ast.expr) -> bool:
    """Whether an expression is a variable or attribute for a backend: `backend`, `recipe.backend.name`."""
    return any(
        (isinstance(part, ast.Name) and part.id == "backend")
        or (isinstance(part, ast.Attribute) and part.attr == "backend")
        for part in ast.walk(operand)
    )


def constants(tree: ast.AST) -> frozenset[str]:
    """The names of constants that hold the name of a backend."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if node.value.value in BACKENDS:
                found |= {target.id for target in targets if isinstance(target, ast.Name) and target.id.isupper()}
    return frozenset(found)


def comparisons(tree: ast.AST, named: frozenset[str]) -> list[str]:
    """The comparisons of a backend with a name, as text.

    Args:
        named: constants that hold the name of one.
    """
    return [
        f"{operand.lineno}: {ast.unparse(operand)}"
        for operand in compared(tree)
        if (isinstance(operand, ast.Constant) and operand.value in BACKENDS)
        or (isinstance(operand, ast.Name) and operand.id in named)
    ]


def test_no_module_asks_for_the_name_of_a_backend() -> None:
    files = [path for home in HOMES for path in sorted((ROOT / home).rglob("*.py"))]
    files = [path for path in files if "backends" not in path.relative_to(ROOT).parts[:2]]
    trees = {path: ast.parse(text) for path in files if "backend" in (text := path.read_text(encoding="utf-8")).lower()}
    named = frozenset[str]().union(*map(constants, trees.values()))
    found = {str(path.relative_to(ROOT)): rows for path, tree in trees.items() if (rows := comparisons(tree, named))}
    assert not found, "ask the objects of the backend: Placement, Numbers, Files"


@pytest.mark.parametrize(
    "text",
    [
        'backend == "tensorrt"',
        'self.backend.name != "virtual"',
        'recipe.backend in ("tensorrt", "virtual")',
        'backend.startswith("qnn")',
        'HOME = "openvino"\nplan.backend == HOME',
    ],
)
def test_a_comparison_is_found(text: str) -> None:
    tree = ast.parse(text)
    assert comparisons(tree, constants(tree))
