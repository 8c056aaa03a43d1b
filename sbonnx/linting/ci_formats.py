"""Findings in the formats of CI systems: GitHub annotations and JUnit XML. SARIF is in `sbonnx.linting.findings`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from sbonnx.linting.findings import Finding, LintRule, Severity
from sbonnx.system.terminal import escaped

COMMANDS: Final[dict[Severity, str]] = {"error": "error", "warning": "warning", "info": "notice"}
"""GitHub's workflow command for each severity."""


def github(findings: Sequence[Finding], model: Path) -> str:
    """Format findings as workflow commands of GitHub Actions, one line each, which annotate the model file.

    Source: docs.github.com, "Workflow commands for GitHub Actions"; their escapes are those of actions/toolkit.
    """
    return "\n".join(
        f"::{COMMANDS[finding.severity]} file={_property(str(model))},title={_property(f'sbonnx {finding.rule}')}::"
        + _data(f"{_place(finding)}{finding.why}. To fix it: {finding.mend}.")
        for finding in findings
    )


def junit(findings: Sequence[Finding], rules: Sequence[LintRule], model: Path, target: str) -> str:
    """Format findings as JUnit XML: a test case per rule, which fails if it has errors.

    Warnings and infos are listed in the output of their case.
    """
    broken = {finding.rule for finding in findings if finding.severity == "error"}
    counts = {"tests": str(len(rules)), "failures": str(len(broken)), "errors": "0"}
    root = ElementTree.Element("testsuites", {"name": "sbonnx lint", **counts})
    suite = ElementTree.SubElement(root, "testsuite", {"name": f"{escaped(str(model))} for {target}", **counts})
    for rule in rules:
        case = ElementTree.SubElement(suite, "testcase", {"name": f"{rule.id}: {rule.title}", "classname": target})
        own = [finding for finding in findings if finding.rule == rule.id]
        lines = [escaped(f"{finding.severity}: {_place(finding)}{finding.why}") for finding in own]
        if rule.id in broken:
            failure = ElementTree.SubElement(case, "failure", {"message": f"must hold: {rule.title}", "type": rule.id})
            failure.text = "\n".join([*lines, f"to fix it: {rule.mend}"])
        elif lines:
            ElementTree.SubElement(case, "system-out").text = "\n".join([*lines, f"to fix it: {rule.mend}"])
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, encoding="unicode")}'


def _place(finding: Finding) -> str:
    names = [name for name in (finding.node, finding.tensor) if name]
    return f"{' / '.join(names)}: " if names else ""


def _data(text: str) -> str:
    return escaped(text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A"))


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


__all__ = ["github", "junit"]
