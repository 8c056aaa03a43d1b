"""Contract checks for authors of plug-ins: observers, roundings, backends, lint rules, metrics and data readers.

Each function raises AssertionError with the broken clause. In a test of a plug-in:

    from sbonnx import testing

    def test_contract():
        testing.check_observer("trimmed")
"""

from __future__ import annotations

from sbonnx.testing.backends import check_backend
from sbonnx.testing.lint_rules import check_lint_rule
from sbonnx.testing.metrics import check_metric
from sbonnx.testing.observers import check_observer
from sbonnx.testing.readers import check_reader
from sbonnx.testing.roundings import check_rounding

__all__ = [
    "check_backend",
    "check_lint_rule",
    "check_metric",
    "check_observer",
    "check_reader",
    "check_rounding",
]
