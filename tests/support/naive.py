"""A plan for tests of calibration alone: every linear op's input and weight, by the plainest rule."""

from __future__ import annotations

from collections.abc import Iterator

from sbonnx.graph import Body, Graph, Node
from sbonnx.graph.query import constant, scopes
from sbonnx.ops import LINEAR
from sbonnx.planning.types import ObserverChoice, Plan, Reader, Site
from sbonnx.spec import QuantSpec, ScaleRule

ACTIVATION = QuantSpec(bits=8, signed=False, symmetric=False)
WEIGHT = QuantSpec(bits=8, signed=True, symmetric=True)


def plan_linear(
    graph: Graph,
    *,
    observer: ObserverChoice | None = None,
    activation: QuantSpec = ACTIVATION,
    weight: QuantSpec = WEIGHT,
    bias: bool = False,
    rule: ScaleRule = "exact",
) -> Plan:
    """Sites at every linear op with a constant weight, in all scopes; one activation site for all linear readers."""
    sites: dict[str, Site] = {}
    for scope, node in _linear(graph):
        kind = LINEAR[node.op]
        x, w = node.inputs[0], node.inputs[kind.weight]
        home = next((where for where, body in scopes(graph) if _computes(body, x.name)), "")
        readers = (*(sites[x.name].readers if x.name in sites else ()), Reader(node.name, 0))
        sites[x.name] = Site(
            x.name, x.name, "activation", activation, readers, "test", x.name, observer or ObserverChoice(), scope=home
        )
        key = f"{w.name}@{node.name}"
        sites[key] = Site(key, w.name, "weight", weight, (Reader(node.name, kind.weight),), "test", key, scope=scope)
        if bias and kind.bias is not None and len(node.inputs) > kind.bias:
            b = node.inputs[kind.bias]
            at = (Reader(node.name, kind.bias),)
            follows = (x.name, key)
            sites[f"{key}/bias"] = Site(
                f"{key}/bias", b.name, "bias", weight, at, "test", f"{key}/bias", follows=follows, scope=scope
            )
    order = sorted(sites.values(), key=lambda site: ("activation", "weight", "bias").index(site.role))
    return Plan(tuple(order), scale_rule=rule)


def _linear(graph: Graph) -> Iterator[tuple[str, Node]]:
    for scope, body in scopes(graph):
        for node in body.nodes:
            if node.op in LINEAR and constant(node.inputs[LINEAR[node.op].weight]) is not None:
                yield scope, node


def _computes(body: Body, name: str) -> bool:
    return any(tensor.name == name for node in body.nodes for tensor in node.outputs)
