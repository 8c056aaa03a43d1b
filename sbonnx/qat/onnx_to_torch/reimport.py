"""Conversion of an ONNX graph to a trainable `torch.fx.GraphModule`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import fx

from sbonnx.errors import ModelError
from sbonnx.graph import Graph, Node
from sbonnx.graph.query import bodies, ordered
from sbonnx.ops import STANDARD_DOMAINS
from sbonnx.qat.onnx_to_torch.importer import GraphImporter
from sbonnx.qat.onnx_to_torch.operators import NodeModule
from sbonnx.qat.onnx_to_torch.specialize import require_no_branches, specialize
from sbonnx.torchnet import FUNCTIONS

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
    """Restore a pickled module."""
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
    """Return the nodes that lead to an output, in topological order."""
    stack = [node for tensor in graph.outputs for node in tensor.inputs]
    needed: set[int] = set()
    while stack:
        node = stack.pop()
        if id(node) not in needed:
            needed.add(id(node))
            stack.extend(maker for tensor in node.inputs for maker in tensor.inputs)
    return [node for node in ordered(graph.nodes) if id(node) in needed]


def _require_supported(nodes: Sequence[Node], opset: int) -> None:
    """Check that every op is supported.

    Raises:
        ModelError: an op is not supported; the message names the first such node and all other missing ops.
    """
    unknown = {
        node.op: node
        for node in reversed(nodes)
        if node.op not in FUNCTIONS or bodies(node) or (node.domain or "") not in STANDARD_DOMAINS
    }
    if unknown:
        *others, first = unknown.values()
        domain = f" of domain '{first.domain}'" if (first.domain or "") not in STANDARD_DOMAINS else ""
        more = f"; nor are {', '.join(sorted(node.op for node in others))}" if others else ""
        raise ModelError(
            f"op {first.op}{domain} (opset {opset}, node '{first.name}') is not supported in training{more}: remove "
            f"that part from the model to train, or export it with other ops"
        )


__all__ = ["META", "NodeInput", "Reimported", "parameter_name", "reimport", "site_of"]
