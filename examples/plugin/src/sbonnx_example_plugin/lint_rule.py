"""A lint rule: nodes have names, so that reports of the runtime can be read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sbonnx.linting.findings import LintRule
from sbonnx.linting.model_view import View


def _long_names(view: View) -> Iterator[tuple[str, str, str]]:
    for node in view.graph.nodes:
        if len(node.name) > LONGEST:
            yield node.name, "", f"its name has {len(node.name)} characters"


LONGEST: Final = 100
"""Characters that the (imagined) profiler of the team shows of a name."""

NAMED_NODES: Final = LintRule(
    "X1", f"names of nodes have at most {LONGEST} characters", "warning", "shorten the name", _long_names
)
