"""Small models with the fault of each lint rule and without it; `python -m tests.lint.examples` stores them.

The stored texts are those of `sbonnx explain RULE` and of the pages of the rules.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final
from unittest import mock

import numpy as np
import onnx

from sbonnx.cli.about.rule_examples import FILE, RuleExample
from sbonnx.linting import RULES, lint, model_view
from sbonnx.system.cpu import CPUS, target_cpu
from tests.lint.seeded import ASIDE, CASES
from tests.lint.test_openvino import SEEDED as SEEDED_OPENVINO
from tests.lint.test_openvino import compiled
from tests.lint.test_ort import SEEDED, conv, weight
from tests.lint.test_qnn import SEEDED as SEEDED_QNN
from tests.lint.test_web import SEEDED as SEEDED_WEB

COUNTER: Final = re.compile(r"(?<=[A-Za-z])_[0-9]{4,}(?=')")
"""Numbers that OpenVINO appends to names of nodes, which differ from run to run."""


@dataclass(frozen=True)
class RuleModels:
    """Models of a rule.

    Attributes:
        bad: breaks the rule.
        good: does not; None if there is none.
        target: of the check.
        cpu: of the check; "": none is named.
        machine: the CPU that the check runs on, for rules that read it; "": any.
    """

    bad: onnx.ModelProto
    good: onnx.ModelProto | None
    target: str
    cpu: str = ""
    machine: str = ""


WITHOUT: Final = {"O32", "O33", "W06"}
"""Rules without an example: O32 has what no other rule explains, O33 needs a machine without onnxruntime, W06 files."""


def rule_models() -> dict[str, RuleModels]:
    """Return the models by rule, in the order of the rules."""
    models = {
        rule: RuleModels(bad.model(), good.model(), bad.target) for rule, (bad, good) in {**CASES, **ASIDE}.items()
    }
    families = {"onnxruntime": SEEDED, "openvino": SEEDED_OPENVINO, "qnn": SEEDED_QNN, "web": SEEDED_WEB}
    for target, seeded in families.items():
        models |= {rule: RuleModels(bad(), good(), target) for rule, (bad, good) in seeded.items()}
    models |= {rule: RuleModels(bad, None, "openvino") for rule, bad in compiled().items()}
    large, small = conv(w=weight(most=127)), conv(w=weight(most=64))
    models["O29"] = RuleModels(large, small, "onnxruntime", machine="avx2")
    models["O30"] = RuleModels(large, small, "onnxruntime", machine="vnni")
    models["O36"] = RuleModels(large, small, "onnxruntime", cpu="avx2")
    return {rule.id: models[rule.id] for rules in RULES.values() for rule in rules if rule.id not in WITHOUT}


def example(rule: str, models: RuleModels) -> RuleExample:
    """Return the stored texts of a rule."""
    machine = {"return_value": CPUS[models.machine]} if models.machine else {"wraps": target_cpu}
    with mock.patch.object(model_view, "target_cpu", **machine):
        finding = next(each for each in lint(models.bad, models.target, cpu=models.cpu) if each.rule == rule)
    place = " / ".join(dict.fromkeys(name for name in (finding.node, finding.tensor) if name))
    return RuleExample(
        f"sbonnx lint model.onnx --target {models.target}{f' --cpu {models.cpu}' if models.cpu else ''}",
        COUNTER.sub("", f"{place}: {finding.why}" if place else finding.why),
        "\n".join(model_lines(models.bad)),
        "" if models.good is None else changed(model_lines(models.bad), model_lines(models.good)),
    )


def model_lines(model: onnx.ModelProto) -> list[str]:
    """Return inputs, nodes and outputs of a model as ONNX text, and types and shapes of its constants."""
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in model.graph.node]
    for node in nodes:
        node.ClearField("name")
    read = {name for node in nodes for name in node.input}
    constants = [_constant(each) for each in model.graph.initializer if each.name in read]
    opset = next(each.version for each in model.opset_import if not each.domain)
    sides = ", ".join(map(_value_info, model.graph.input)), ", ".join(map(_value_info, model.graph.output))
    return [
        f"# opset {opset}, {sides[0]} to {sides[1]}",
        *(onnx.printer.to_text(node).strip() for node in nodes),
        *constants,
    ]


def _value_info(value: onnx.ValueInfoProto) -> str:
    kind = value.type.tensor_type
    dims = ", ".join(str(dim.dim_value or dim.dim_param or "?") for dim in kind.shape.dim)
    return f"{value.name}: {onnx.TensorProto.DataType.Name(kind.elem_type).lower()}[{dims}]"


def changed(bad: Sequence[str], good: Sequence[str]) -> str:
    """Return the lines that differ, with - and + before them."""
    return "\n".join(line for line in difflib.ndiff(bad, good) if line.startswith(("- ", "+ ")))


def _constant(tensor: onnx.TensorProto) -> str:
    kind = onnx.TensorProto.DataType.Name(tensor.data_type).lower()
    values = onnx.numpy_helper.to_array(tensor).astype(np.float64)
    low, high = values.min(), values.max()
    value = f"= {low:.6g}" if low == high else f"from {low:.6g} to {high:.6g}"
    return f"# {tensor.name}: {kind}[{', '.join(map(str, tensor.dims))}] {value}"


def examples() -> dict[str, RuleExample]:
    """Return the texts of all rules."""
    return {rule: example(rule, models) for rule, models in rule_models().items()}


if __name__ == "__main__":
    rows = (f"{json.dumps(rule)}: {json.dumps(asdict(texts))}" for rule, texts in examples().items())
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
