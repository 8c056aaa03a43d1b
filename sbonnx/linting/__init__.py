"""Checks of Q/DQ models against the rules of a runtime."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from onnx import ModelProto

from sbonnx import graph as graphs
from sbonnx import plugins
from sbonnx.backends.tensorrt.profiles import PROFILES
from sbonnx.errors import RecipeError
from sbonnx.graph import Graph
from sbonnx.linting.findings import Finding, LintRule, Severity
from sbonnx.linting.model_view import View
from sbonnx.linting.openvino import OPENVINO_RULES
from sbonnx.linting.ort import ORT_RULES
from sbonnx.linting.qnn import QNN_RULES
from sbonnx.linting.tensorrt import TENSORRT
from sbonnx.linting.web_rules import WEB_RULES
from sbonnx.plugins.registry import instance_of

RULES: Final[dict[str, tuple[LintRule, ...]]] = {
    "tensorrt": TENSORRT,
    "onnxruntime": ORT_RULES,
    "openvino": OPENVINO_RULES,
    "qnn": QNN_RULES,
    "web": WEB_RULES,
}
"""Rules by family of the target, in the order of the report."""

TARGETS: Final = (*(profile.target for profile in PROFILES.values()), "onnxruntime", "openvino", "qnn", "web")


def rules_for(target: str) -> tuple[LintRule, ...]:
    """Return the rules that apply to a target.

    Raises:
        RecipeError: the target is not known, or a rule of an installed package cannot be imported.
    """
    if target not in TARGETS:
        raise RecipeError(f"target '{target}' is not known: choose one of {', '.join(TARGETS)}")
    family = target.partition("@")[0]
    rules = (*RULES[family], *_plugged_in(family))
    return tuple(rule for rule in rules if not rule.versions or target in rule.versions)


def _plugged_in(family: str) -> Iterator[LintRule]:
    """Yield the rules of installed packages for a family of targets, by name of the entry point."""
    for name, rule in plugins.plugins_of(plugins.LINT_RULES, instance_of(LintRule, "sbonnx.linting.LintRule")):
        if name.partition(".")[0] == family and isinstance(rule, LintRule):
            yield rule


def lint(
    model: str | os.PathLike[str] | ModelProto | Graph, target: str = TARGETS[0], *, cpu: str = ""
) -> list[Finding]:
    """Find everything in a model that a runtime would reject, misread or run slowly. The model is not changed.

    Args:
        model: path, ModelProto or graph, quantized by any tool.
        target: one of `TARGETS`.
        cpu: "this" or a key of `sbonnx.system.cpu.CPUS`, the CPU that will run the file; "": as its metadata says,
            else this.

    Returns:
        The findings by rule, in the order of `RULES`, and in node order within a rule.

    Raises:
        RecipeError: the target is not known.
        ModelError: the file cannot be read, or is not valid ONNX.
    """
    rules = rules_for(target)
    graph = model if isinstance(model, Graph) else graphs.load(model, opset=1)  # opset=1: no version conversion
    view = View(graph, target, cpu)
    return [
        Finding(rule.id, rule.severity, node, tensor, why, rule.mend)
        for rule in rules
        for node, tensor, why in rule.check(view)
    ]


__all__ = ["RULES", "TARGETS", "Finding", "LintRule", "Severity", "View", "lint", "rules_for"]
