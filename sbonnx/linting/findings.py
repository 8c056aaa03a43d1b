"""Rules and findings, and their output as SARIF 2.1.0 for code hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import quote

from sbonnx.values import JsonValue
from sbonnx.version import __version__

if TYPE_CHECKING:
    from sbonnx.linting.model_view import View


Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True)
class Finding(JsonValue):
    """One place where a model violates a rule.

    Attributes:
        rule: id of the rule, such as "T02".
        severity: "error": the runtime rejects the model, or computes other results; "warning": slower or less accurate;
            "info": cannot be decided from the file alone.
        node: name of the node, or "".
        tensor: name of the tensor, or "".
        why: description of the violation.
        mend: recommended action.
    """

    rule: str
    severity: Severity
    node: str
    tensor: str
    why: str
    mend: str


@dataclass(frozen=True)
class LintRule:
    """One rule of a runtime.

    Attributes:
        id: short and stable; the same in reports, documents and CI.
        title: the requirement.
        severity: severity of every finding.
        mend: recommended action for a finding.
        check: yields (node, tensor, why) for each violation.
        versions: targets that the rule applies to, such as "tensorrt@11"; empty for all of its family.
    """

    id: str
    title: str
    severity: Severity
    mend: str
    check: Callable[[View], Iterable[tuple[str, str, str]]]
    versions: tuple[str, ...] = ()


SCHEMA: Final = "https://json.schemastore.org/sarif-2.1.0.json"

LEVELS: Final[dict[Severity, str]] = {"error": "error", "warning": "warning", "info": "note"}


def sarif(findings: Sequence[Finding], rules: Sequence[LintRule], model: Path) -> dict[str, Any]:
    """Create one SARIF run: the checked rules, and one result per finding.

    Args:
        findings: findings of these rules only.
        rules: all checked rules.
        model: the file; its path is written as given, so that a relative path refers to the repository.
    """
    uri = model.as_uri() if model.is_absolute() else quote(model.as_posix())
    places = {rule.id: place for place, rule in enumerate(rules)}
    rows = [
        {
            "id": rule.id,
            "shortDescription": {"text": rule.title},
            "help": {"text": f"Must hold: {rule.title}. To fix it: {rule.mend}."},
            "defaultConfiguration": {"level": LEVELS[rule.severity]},
        }
        for rule in rules
    ]
    driver = {"name": "sbonnx", "version": __version__, "rules": rows}
    run = {
        "tool": {"driver": driver},
        "artifacts": [{"location": {"uri": uri}}],
        "results": [_result(finding, places[finding.rule], uri) for finding in findings],
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


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
        "message": {"text": f"{where}{finding.why}. To fix it: {finding.mend}."},
        "locations": [location],
    }
