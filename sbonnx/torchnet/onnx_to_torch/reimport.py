"""Conversion of an ONNX graph to a trainable `torch.fx.GraphModule`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import fx

from sbonnx.errors import ModelError
from sbonnx.graph import Constant, Graph, Node, copy
from sbonnx.graph.edit import replace_input
from sbonnx.graph.query import all_nodes, bodies, dtype, ordered, readers, shape
from sbonnx.ops import STANDARD_DOMAINS
from sbonnx.patterns import SIMPLIFY, apply
from sbonnx.torchnet import function_of
from sbonnx.torchnet.onnx_to_torch.fx_conversion import GraphImporter
from sbonnx.torchnet.onnx_to_torch.operators import NodeModule

BRANCH: Final = "If"


def specialize(
    graph: Graph,
    *,
    fixed: Mapping[str, Any] | None = None,
    shapes: Mapping[str, Sequence[int | str | None]] | None = None,
) -> Graph:
    """Specialize a graph to input values and shapes and simplify it; Ifs with a constant condition are inlined.

    A plan for such a model must be made from the specialized graph. The given graph is not changed; it is returned as
    is if there is nothing to do (no value, no shape, no If).

    Args:
        graph: graph to specialize.
        fixed: inputs that become constants (a sampling rate, a flag): value by name.
        shapes: shapes of inputs by name: sizes, and names or None for axes that stay dynamic.

    Raises:
        ModelError: there is no such input, or the value or shape does not match it.
    """
    values, wanted = dict(fixed or {}), dict(shapes or {})
    if not values and not wanted and not any(_branches(graph)):
        return graph
    specialized = copy(graph)
    inputs = {tensor.name: tensor for tensor in specialized.inputs}
    for name in [*values, *wanted]:
        if name not in inputs:
            raise ModelError(f"the model has no input '{name}' to fix; its inputs are {', '.join(inputs)}")
    for name, dims in wanted.items():
        _check(name, shape(inputs[name]), tuple(dims))
        inputs[name].shape = tuple(dims)
    for name, value in values.items():
        tensor = inputs[name]
        array = np.asarray(value, dtype(tensor))
        _check(name, shape(tensor), array.shape)
        if any(output is tensor for output in specialized.outputs):
            raise ModelError(f"input '{name}' is also an output of the model and cannot be fixed")
        fixed_value = Constant(name, array)
        for node, index in readers(tensor):
            replace_input(node, index, fixed_value)
        specialized.inputs = [other for other in specialized.inputs if other is not tensor]
    apply(specialized, SIMPLIFY)
    return specialized


def require_no_branches(graph: Graph) -> None:
    """Check that the graph has no If left.

    Raises:
        ModelError: the condition of an If is not constant; the message names it.
    """
    for node in _branches(graph):
        raise ModelError(
            f"the condition '{node.inputs[0].name}' of node '{node.name}' (If) is not constant, so the "
            "branch to train is not known. Fix the inputs that it depends on (fixed={'name': value}, or shapes=...)"
        )


def _branches(graph: Graph) -> list[Any]:
    return [node for node in all_nodes(graph) if node.op == BRANCH and (node.domain or "") in STANDARD_DOMAINS]


def _check(name: str, known: tuple[Any, ...] | None, dims: tuple[Any, ...]) -> None:
    sizes = zip(known or dims, dims, strict=False)
    clash = any(isinstance(size, int) and isinstance(dim, int) and size != dim for size, dim in sizes)
    if clash or (known is not None and len(known) != len(dims)):
        raise ModelError(f"input '{name}' has shape {list(known or ())}, which does not match {list(dims)}")


CALL_MODULE: Final = "call_module"
"""torch.fx opcode of nodes that call a submodule."""

META: Final = "sbonnx"
"""Key in `module.meta` of the information that `reimport` stores."""


class Reimported(fx.GraphModule):  # type: ignore[misc]
    """ONNX graph as a module. Copying and pickling preserve `meta`."""

    def __reduce__(self) -> tuple[Any, ...]:
        _, (body, imports) = super().__reduce__()
        return _restored, (body, imports, self.meta)


def _restored(body: dict[str, Any], imports: str, meta: dict[str, Any]) -> Reimported:
    plain = fx.graph_module.reduce_graph_module(body, imports)
    module = Reimported(plain, plain.graph, class_name="Reimported")
    module.meta.update(meta)
    return module


class NodeInput(NamedTuple):
    """One input of a node: argument `position` of `node`."""

    node: fx.Node
    position: int

    @property
    def value(self) -> fx.Node:
        """Node whose value is read."""
        return self.node.args[self.position]


def reimport(
    graph: Graph,
    *,
    device: str | torch.device = "cpu",
    fixed: Mapping[str, Any] | None = None,
    shapes: Mapping[str, Sequence[int | str | None]] | None = None,
) -> Reimported:
    """Convert the graph to an equivalent torch module for training.

        module = reimport(graph)
        logits = module(images)["logits"]

    - Inputs are passed in the order of the graph, or by name (as Python identifiers). The output is a dict by the
      names of the graph's outputs.
    - Every node is a submodule named after it (`operators.NodeModule`). Weights are attributes of the
      root module, named after their initializers. Names are converted by `importer.PythonNames`.
    - Floating-point initializers of rank 1 or more are parameters. Buffers are: integers, single numbers in
      element-wise arithmetic, masks, and the statistics of norms (separate for each node). Shapes and axes are Python
      constants in the code.
    - BatchNormalization is trained and updates its statistics in train mode (`operators.BatchNorm`); in eval mode the
      module computes the same as onnxruntime. Dropout is a no-op, as in a model for inference.
    - Shapes are computed at run time: dynamic axes of the graph may have any size.
    - `module.meta["sbonnx"]` contains: `parameters`, `buffers` and `inputs` (name in the graph by Python name);
      `statistics` (Python names of mean and variance by node); `outputs`; `opset`.

    Args:
        graph: graph to convert; not changed. Nodes that do not lead to an output are left out.
        device: device of parameters and buffers.
        fixed, shapes: values and shapes of inputs that make the conditions of branches constant; see `specialize`.

    Raises:
        ModelError: an op is not supported (the message names opset and node), the condition of a branch is not
            constant, or torch does not have the type of a constant.
    """
    specialized = specialize(graph, fixed=fixed, shapes=shapes)
    nodes = _needed(specialized)
    require_no_branches(specialized)
    _require_supported(nodes, specialized.opset)
    importer = GraphImporter(specialized)
    importer.build(nodes)
    module = Reimported(importer.root, importer.graph, class_name="Reimported")
    module.meta[META] = importer.meta
    moved: Reimported = module.to(device)
    return moved


def parameter_name(module: fx.GraphModule, initializer: str) -> str:
    """Return the name of the parameter of an initializer.

    Raises:
        ModelError: the initializer did not become a parameter, or the module was not made by `reimport`.
    """
    meta: dict[str, Any] | None = getattr(module, "meta", {}).get(META)
    if meta is None:
        raise ModelError("the module was not made by sbonnx.qat.reimport: it has no meta['sbonnx']")
    for name, source in meta["parameters"].items():
        if source == initializer:
            return str(name)
    what = "a buffer" if initializer in meta["buffers"].values() else "not read by a node as a tensor"
    raise ModelError(f"initializer '{initializer}' is not a parameter of the module: it is {what}")


def site_of(module: fx.GraphModule, node_name: str, input_index: int) -> NodeInput:
    """Find the read of an input of an ONNX node. A module inserted there changes this input of this node only.

        read = site_of(module, "conv1", 0)
        with module.graph.inserting_before(read.node):
            quantized = module.graph.call_module("conv1_input_quantizer", (read.value,))
        read.node.update_arg(read.position, quantized)

    Raises:
        ModelError: there is no such node, or this input is not a tensor (omitted, or a shape in the code).
    """
    for node in module.graph.nodes:
        if node.op != CALL_MODULE:
            continue
        target = module.get_submodule(str(node.target))
        if isinstance(target, NodeModule) and target.call.name == node_name:
            if not 0 <= input_index < len(node.args) or not isinstance(node.args[input_index], fx.Node):
                raise ModelError(f"input {input_index} of node '{node_name}' ({target.call.op}) is not a tensor")
            return NodeInput(node, input_index)
    raise ModelError(f"the module has no node '{node_name}': no output depends on it, or it is of another graph")


def _needed(graph: Graph) -> list[Node]:
    stack = [node for tensor in graph.outputs for node in tensor.inputs]
    needed: set[int] = set()
    while stack:
        node = stack.pop()
        if id(node) not in needed:
            needed.add(id(node))
            stack.extend(maker for tensor in node.inputs for maker in tensor.inputs)
    return [node for node in ordered(graph.nodes) if id(node) in needed]


def _require_supported(nodes: Sequence[Node], opset: int) -> None:
    """Raise a ModelError that names the first unsupported node and all other missing ops."""
    unknown = {node.op: node for node in reversed(nodes) if bodies(node) or function_of(node.op, node.domain) is None}
    if unknown:
        *others, first = unknown.values()
        domain = f" of domain '{first.domain}'" if (first.domain or "") not in STANDARD_DOMAINS else ""
        more = f"; nor are {', '.join(sorted(node.op for node in others))}" if others else ""
        raise ModelError(
            f"op {first.op}{domain} (opset {opset}, node '{first.name}') is not supported in training{more}: remove "
            f"that part from the model to train, or export it with other ops"
        )
