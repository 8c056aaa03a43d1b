"""Stored examples of the lint rules: those of the tests' models, and every rule has one."""

from __future__ import annotations

from dataclasses import replace

from sbonnx.cli.about.rule_examples import example_of
from sbonnx.linting import RULES
from tests.lint.examples import WITHOUT, examples
from tests.support.extras import needs_openvino

QUOTES = frozenset({"O37", "V15"})
"""Rules whose findings quote the runtime, in other words in other versions."""


@needs_openvino
def test_stored_examples_are_those_of_the_models() -> None:
    """After a change: python -m tests.lint.examples."""
    fresh = examples()
    for rule, example in fresh.items():
        stored = example_of(rule)
        assert stored is not None
        assert stored == (replace(example, finding=stored.finding) if rule in QUOTES else example)
    assert set(fresh) == {rule.id for rules in RULES.values() for rule in rules} - WITHOUT
    assert example_of("O33") is None
