"""What lint finds: in sbonnx's files for each version of TensorRT, and in the peer's files."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from benchmarks.accuracy import Run, ours, peer, peer_input
from benchmarks.results import table
from benchmarks.targets.models import Subject, first_line
from sbonnx.linting import Finding, lint
from sbonnx.ops import ADDS, CONVOLUTIONS, DEQUANTIZE, QUANTIZE, RECTIFIERS

VERSIONS = ("tensorrt@11", "tensorrt@10", "tensorrt@8.6")
PEER_SUBJECTS = ("resnet18", "cifar_resnet20")
FACTS = {
    "QuantizeLinear with a zero point that is not 0": ("T02",),
    "int32 biases behind DequantizeLinear": ("T17",),
    "Adds with both inputs behind DequantizeLinear": ("P04",),
    "convolutions with a pair before an Add": ("P04",),
    "convolutions with a pair before a Relu": ("P02",),
    "graph outputs behind DequantizeLinear": ("P10",),
}
"""Defects that are counted in the peer's files independently of lint, with the rules that must find them."""


class Census:
    """Counts of the `FACTS` in one file, node by node, without branches."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.graph = model.graph
        self.held = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        self.makers = {name: node for node in model.graph.node for name in node.output}

    def behind(self, name: str) -> bool:
        """Return whether a tensor is the output of a DequantizeLinear."""
        return name in self.makers and self.makers[name].op_type in DEQUANTIZE

    def before(self, ops: frozenset[str]) -> int:
        """Count convolutions whose output is read by one of these ops through a Q/DQ pair."""
        found = set()
        for node in self.graph.node:
            for name in node.input if node.op_type in ops else ():
                if not self.behind(name):
                    continue
                quantize = self.makers.get(self.makers[name].input[0])
                source = self.makers.get(quantize.input[0]) if quantize is not None else None
                if source is not None and source.op_type in CONVOLUTIONS:
                    found.add(source.output[0])
        return len(found)

    def facts(self) -> dict[str, int]:
        """Return the counts by the names of `FACTS`."""
        nodes = self.graph.node
        counts = (
            sum(node.op_type in QUANTIZE and bool(np.any(self.held[node.input[2]])) for node in nodes),
            sum(
                node.op_type in DEQUANTIZE and getattr(self.held.get(node.input[0]), "dtype", None) == np.int32
                for node in nodes
            ),
            sum(node.op_type in ADDS and all(map(self.behind, node.input)) for node in nodes),
            self.before(ADDS),
            self.before(RECTIFIERS),
            sum(self.behind(value.name) for value in self.graph.output),
        )
        return dict(zip(FACTS, counts, strict=True))


def rules(findings: Iterable[Finding], severity: str) -> str:
    """Format the counts of rules: ``T02 × 64, T17 × 21``, or 0."""
    found = Counter(finding.rule for finding in findings if finding.severity == severity)
    return ", ".join(f"{rule} × {count}" for rule, count in sorted(found.items())) or "0"


def linted(label: Sequence[str], run: Run, target: str, folder: Path) -> list[str]:
    """Return one row with errors, warnings and notes of the file that `run` writes."""
    path = folder / "linted.onnx"
    path.unlink(missing_ok=True)
    try:
        run(path)
        findings = lint(path, target)
    except Exception as error:
        return [*label, target, first_line(error), "", ""]
    return [*label, target, *(rules(findings, severity) for severity in ("error", "warning", "info"))]


def our_rows(one: Subject) -> list[list[str]]:
    """Return the rows of sbonnx's files, quantized and linted for each target version."""
    with tempfile.TemporaryDirectory() as folder:
        return [
            linted([one.name], ours(one.model, one.feeds, version, verify=False), version, Path(folder))
            for version in VERSIONS
        ]


def peer_rows(one: Subject) -> list[list[str]]:
    """Return the rows of the peer's two settings: counted facts and lint findings."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        prepared = peer_input(one.model, Path(folder))
        for setting, switches in (("default", False), ("TensorRT switches", True)):
            path = Path(folder) / "peer.onnx"
            peer(prepared, one.feeds, path, per_channel=switches, tensorrt=switches)
            counts = Counter(finding.rule for finding in lint(path, VERSIONS[1]))
            for fact, number in Census(onnx.load(str(path))).facts().items():
                found = ", ".join(f"{rule} × {counts[rule]}" for rule in FACTS[fact])
                rows.append([one.name, setting, fact, str(number), found])
            listed = {rule for names in FACTS.values() for rule in names}
            rest = ", ".join(f"{rule} × {count}" for rule, count in sorted(counts.items()) if rule not in listed)
            rows.append([one.name, setting, "other rules", "", rest or "none"])
    return rows


def text(subjects: Sequence[Subject]) -> str:
    """Return both tables with their explanation."""
    own = [row for one in subjects for row in our_rows(one)]
    theirs = [row for one in subjects if one.name in PEER_SUBJECTS for row in peer_rows(one)]
    return (
        "## Lint\n\nsbonnx's files, made for each version of TensorRT and checked against its rules. Info: what the "
        "file alone cannot decide.\n\n"
        + table(("model", "target", "errors", "warnings", "info"), own)
        + "\n\nThe peer's files, checked for tensorrt@10. Counted: node by node, without lint.\n\n"
        + table(("model", "setting", "fact", "counted", "lint"), theirs)
    )
