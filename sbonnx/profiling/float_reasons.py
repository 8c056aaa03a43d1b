"""Reasons why nodes stay float that no refusal names: the rules of a backend do not reach them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Final

from sbonnx.backends import Backend, Rule
from sbonnx.report import Reason, Refusal
from sbonnx.report.details import Details, NodeRow

CONDITIONS: Final = {
    "input_written": "an integer kernel writes one of its inputs",
    "between_linear": "it is between integer convolutions or products",
    "inputs_integer": "integer kernels write all of its inputs",
    "output_read_quantized": "the readers of its output read integers",
    "not_after_producer": "no convolution, product or sum is directly before it",
}
"""Conditions of rules (`Rule.when`) in words."""


def with_float_reasons(
    details: Details, backend: Backend, planned: Collection[str] = ()
) -> tuple[Details, tuple[Refusal, ...]]:
    """Add to each float node without a refusal the reason why it stays float; return the reasons too.

    Nodes that compute no floats, such as sizes, have none.

    Args:
        details: nodes of a plan, or of a quantized file.
        backend: its rules give the reasons.
        planned: names of the nodes that a plan for the backend quantizes.
    """
    rows = details.nodes
    reasons = {refusal.where: refusal for refusal in _reasons(rows, backend, planned)}
    nodes = tuple(
        replace(row, refusals=(f"{reason.what}: {reason.why}",), codes=(reason.code,))
        if (reason := reasons.get(row.name)) is not None
        else row
        for row in rows
    )
    return replace(details, nodes=nodes), tuple(reasons.values())


def _reasons(rows: Sequence[NodeRow], backend: Backend, planned: Collection[str]) -> Iterator[Refusal]:
    computed: set[str] = set()  # nodes that integer kernels compute
    for row in rows:
        folds = row.op in backend.placement.folds and len(row.inputs) == 1 and row.inputs[0] in computed
        if row.reads or folds:
            computed.add(row.name)
        floats = any("float" in tensor.dtype for tensor in row.outputs)
        if row.reads or row.refusals or not floats:
            continue
        if folds:
            why = Reason("in-kernel-before", f"{backend.name} computes it in the kernel of '{row.inputs[0]}'")
        elif row.name in planned:
            why = Reason(
                "not-as-planned",
                f"the default plan for {backend.name} quantizes it: a recipe, a search or another tool left it float",
            )
        else:
            why = _rule_reason(row.op, backend.placement.rule_for(row.op), backend)
        yield Refusal("quantize", row.name, why)


def _rule_reason(op: str, rule: Rule | None, backend: Backend) -> Reason:
    if rule is None:
        return Reason("no-rule-for-operator", f"no rule of {backend.name} quantizes {op}: it is computed in float")
    if rule.switch is not None and not rule.default:
        return Reason("rule-is-off", f"{op} stays float unless QUANTIZE_INPUTS_OF has {{{rule.switch}: true}}")
    condition = CONDITIONS.get(rule.when, "its inputs are float activations")
    return Reason("rule-does-not-apply", f"{backend.name} gains by integers in {op} only if {condition}")
