"""Texts of all reasons that a plan can give for what stays float, read from the source code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]

FILES: Final = (
    *sorted((ROOT / "sbonnx" / "plan").glob("*.py")),
    *(ROOT / "sbonnx" / "backends" / name / "backend.py" for name in ("onnxruntime", "openvino", "tensorrt")),
    ROOT / "sbonnx" / "backends" / "onnxruntime" / "ort_nbits.py",
    ROOT / "calib" / "qparams" / "safe_scales.py",
    ROOT / "calib" / "qparams" / "solve.py",
)

REFUSING: Final = ("refuse", "Refusal", "_refuse")
"""Functions whose last argument is a reason."""

NAMES: Final = ("why", "why_not", "slow")
"""Variables that hold reasons."""

OTHER: Final = frozenset({"fills_other"})
"""Functions that return why a rule does not apply, which is not reported."""

PARTS: Final = (", below which ", "rows of an embedding: weights alone")
"""Beginnings of texts that are the end of a reason, or the reason of a site."""

PLACEHOLDER: Final = "8"


def reason_texts() -> dict[str, str]:
    """Return the texts, and where each is: values in f-strings are replaced by `PLACEHOLDER`."""
    texts: dict[str, str] = {}
    for file in FILES:
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef) and function.name not in OTHER:
                where = f"{file.relative_to(ROOT)}: {function.name}"
                texts |= dict.fromkeys((text for value in _values(function) for text in _texts(value)), where)
    return {text: where for text, where in texts.items() if any(map(str.isalpha, text)) and not text.startswith(PARTS)}


def _values(function: ast.FunctionDef) -> Iterator[ast.expr]:
    """Yield the expressions of a function that are reasons."""
    returns = "" if function.returns is None else ast.unparse(function.returns)
    gives = returns in ("str | None", "Iterator[str]", "Iterator[tuple[Site, str]]") or function.name == "_no_weight"
    for part in ast.walk(function):
        if gives and isinstance(part, (ast.Return, ast.Yield)) and part.value is not None:
            yield part.value
        elif isinstance(part, ast.Call) and getattr(part.func, "attr", getattr(part.func, "id", "")) in REFUSING:
            yield from part.args[-1:]
        elif isinstance(part, ast.Assign) and any(getattr(name, "id", "") in NAMES for name in part.targets):
            yield part.value


def _texts(value: ast.expr) -> list[str]:
    """Return the texts that an expression may have, if it consists of literals."""
    if isinstance(value, ast.Constant):
        return [value.value] if isinstance(value.value, str) else []
    if isinstance(value, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else PLACEHOLDER for part in value.values)
        return ["".join(map(str, parts))]
    if isinstance(value, ast.IfExp):
        return [*_texts(value.body), *_texts(value.orelse)]
    if isinstance(value, ast.BoolOp):
        return [text for one in value.values for text in _texts(one)]
    if isinstance(value, ast.Tuple):
        return _texts(value.elts[-1])
    return []
