"""A small model that breaks each lint rule, with the finding; the tests' models, stored by `tests.lint.examples`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FILE: Final = Path(__file__).with_name("rule_examples.json")


@dataclass(frozen=True)
class RuleExample:
    """A model that breaks a rule.

    Attributes:
        command: the command that finds it in a file `model.onnx`.
        finding: where and why, as `sbonnx lint` prints it.
        model: nodes as ONNX text, and types and shapes of the constants.
        change: lines that differ in a model without the fault, as in a diff; "" if none is stored.
    """

    command: str
    finding: str
    model: str
    change: str


def example_of(rule: str) -> RuleExample | None:
    """Return the example of a rule; None: it depends on the machine or on an installed package."""
    stored = json.loads(FILE.read_text(encoding="utf-8")).get(rule)
    return None if stored is None else RuleExample(**stored)
