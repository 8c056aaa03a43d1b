"""Traces channels through a graph with a table of rules, one for each kind of operator.

Channels have ids. Constraints on ids join channels into groups, or fix channels that take no part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from sbonnx.channels.ids import FIXED, Ids
from sbonnx.graph import Body, Node, Tensor
from sbonnx.graph.query import bodies, captured, dtype, shape
from sbonnx.ops import READS_SHAPE, STANDARD_DOMAINS
from sbonnx.report.codes import Reason
from sbonnx.spec import Array

Shape = tuple[int | str | None, ...]


@dataclass
class Trace:
    """Mutable state of a trace, while the nodes of a graph are visited in order.

    Attributes:
        ids: constraints on the channels.
        of: by id of a tensor, int64 channel ids that broadcast against it. Tensors without an entry are fixed.
        why: by id of a tensor, the reason why it is fixed.
        refusal: reason for operators without a rule, after their name.
    """

    refusal: ClassVar[Reason] = Reason("inputs-unscaled", "needs its inputs unscaled")

    ids: Ids = field(default_factory=Ids)
    of: dict[int, Array] = field(default_factory=dict)
    why: dict[int, Reason] = field(default_factory=dict)

    def known(self, tensor: Tensor) -> Array | None:
        """Return the channel ids of a tensor, or None."""
        return self.of.get(id(tensor))

    def full(self, tensor: Tensor) -> Array | None:
        """Return the ids of a tensor with all axes (size 1 if constant along it); None without ids or known rank."""
        ids, size = self.known(tensor), shape(tensor)
        if ids is None or size is None or ids.ndim > len(size):
            return None
        return ids.reshape((1,) * (len(size) - ids.ndim) + ids.shape)

    def give(self, tensor: Tensor, ids: Array | None) -> None:
        """Set the ids of a node's output."""
        if ids is not None and ids.size and (ids != FIXED).any():
            self.of[id(tensor)] = ids

    def keep(self, tensor: Tensor, why: Reason) -> None:
        """Fix the channels of a tensor."""
        ids = self.known(tensor)
        if ids is not None:
            self.ids.pin(ids, why)

    def refuse(self, node: Node, why: Reason | None = None) -> None:
        """Fix the channels of the inputs of a node; its outputs get none."""
        why = why or Reason(self.refusal.code, f"{node.op} '{node.name}' {self.refusal}")
        for tensor in node.inputs:
            self.keep(tensor, why)
        for tensor in node.outputs:
            self.why[id(tensor)] = Reason("comes-from-untraced", f"it comes from {node.op} '{node.name}'")


Rule = Callable[[Trace, Node, Body], None]
"""Gives ids to the outputs of a node, and constrains those of its inputs."""

AnyTrace = TypeVar("AnyTrace", bound=Trace)


def walk(
    trace: AnyTrace, scopes: Iterable[Body], rules: Mapping[str, Callable[[AnyTrace, Node, Body], None]]
) -> dict[str, Array]:
    """Trace scopes, in topological order, with a table of rules; return the ids of tensors by name.

    Inputs and outputs of the scopes are fixed, and tensors that bodies read from outside.
    """
    tensors: dict[int, Tensor] = {}
    for body in scopes:
        for tensor in body.inputs:
            trace.why[id(tensor)] = Reason("is-input", f"'{tensor.name}' is an input")
        for node in body.nodes:
            _visit(trace, node, body, rules)
            tensors.update((id(tensor), tensor) for tensor in node.outputs)
        for tensor in body.outputs:
            trace.keep(tensor, Reason("is-output", f"'{tensor.name}' is an output"))
    return {tensors[key].name: ids for key, ids in trace.of.items()}


def _visit(
    trace: AnyTrace, node: Node, body: Body, rules: Mapping[str, Callable[[AnyTrace, Node, Body], None]]
) -> None:
    for _, inner in bodies(node):
        for tensor in captured(inner):
            trace.keep(tensor, Reason("read-in-branch", f"a branch of '{node.name}' reads it"))
    standard = (node.domain or "") in STANDARD_DOMAINS
    rule = rules.get(node.op) if standard else None
    if rule is not None:
        rule(trace, node, body)
    elif not (standard and node.op in READS_SHAPE):
        trace.refuse(node)


def is_float(tensor: Tensor) -> bool:
    """Return whether a tensor is float16, float32 or float64, into which scales can be folded."""
    kind = dtype(tensor)
    return kind is not None and kind.kind == "f"
