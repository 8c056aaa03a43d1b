"""The contract of lint rules."""

from __future__ import annotations

from onnx import ModelProto

from sbonnx.linting import lint, rules_for


def check_lint_rule(rule: str, target: str, bad: ModelProto, clean: ModelProto) -> None:
    """Check the lint rule with this id.

    The clauses: it is found in the bad model and not in the clean one; findings name a node or a tensor, and say why;
    neither model is changed.

    Args:
        rule: id of the rule.
        target: a target that it applies to, such as "onnxruntime".
        bad, clean: models with and without the fault.

    Raises:
        AssertionError: a clause is broken.
        RecipeError: there is no such target.
    """
    assert rule in {finding.id for finding in rules_for(target)}, f"rule '{rule}' is not installed for {target}"
    before = [model.SerializeToString(deterministic=True) for model in (bad, clean)]
    findings = [finding for finding in lint(bad, target) if finding.rule == rule]
    assert findings, f"rule '{rule}': the bad model has a finding"
    for finding in findings:
        assert finding.node or finding.tensor, f"rule '{rule}': a finding names a node or a tensor"
        assert finding.why.strip(), f"rule '{rule}': a finding says why"
    assert not [finding for finding in lint(clean, target) if finding.rule == rule], (
        f"rule '{rule}': the clean model has none"
    )
    after = [model.SerializeToString(deterministic=True) for model in (bad, clean)]
    assert before == after, f"rule '{rule}': models are not changed"
