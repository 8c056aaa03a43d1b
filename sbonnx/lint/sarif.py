"""Output of findings as SARIF 2.1.0, which code hosts show next to the change that caused them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from sbonnx.lint.types import Finding, Rule, Severity
from sbonnx.version import __version__

SCHEMA: Final = "https://json.schemastore.org/sarif-2.1.0.json"

LEVELS: Final[dict[Severity, str]] = {"error": "error", "warning": "warning", "info": "note"}


def sarif(findings: Sequence[Finding], rules: Sequence[Rule], model: Path) -> dict[str, Any]:
    """Create one SARIF run: the checked rules, and one result per finding.

    Args:
        findings: findings of these rules only.
        rules: all checked rules.
        model: the file; its path is written as given, so that a relative path refers to the repository.
    """
    uri = model.as_uri() if model.is_absolute() else quote(model.as_posix())
    places = {rule.id: place for place, rule in enumerate(rules)}
    driver = {"name": "sbonnx", "version": __version__, "rules": [_rule(rule) for rule in rules]}
    run = {
        "tool": {"driver": driver},
        "artifacts": [{"location": {"uri": uri}}],
        "results": [_result(finding, places[finding.rule], uri) for finding in findings],
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.id,
        "shortDescription": {"text": rule.title},
        "help": {"text": f"Must hold: {rule.title}. To mend it: {rule.mend}."},
        "defaultConfiguration": {"level": LEVELS[rule.severity]},
    }


def _result(finding: Finding, index: int, uri: str) -> dict[str, Any]:
    location: dict[str, Any] = {"physicalLocation": {"artifactLocation": {"uri": uri, "index": 0}}}
    names = [name for name in (finding.node, finding.tensor) if name]
    if names:
        location["logicalLocations"] = [{"name": name, "fullyQualifiedName": name, "kind": "element"} for name in names]
    where = f"{' / '.join(names)}: " if names else ""
    return {
        "ruleId": finding.rule,
        "ruleIndex": index,
        "level": LEVELS[finding.severity],
        "message": {"text": f"{where}{finding.why}. To mend it: {finding.mend}."},
        "locations": [location],
    }
