"""Graph classes: those of onnx-graphsurgeon, plus the model data that it drops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs

from sbonnx.graph.constant_edits import Edits
from sbonnx.graph.storage.weights import WeightBytes
from sbonnx.report.codes import Note

Node = gs.Node
Tensor = gs.Tensor
Variable = gs.Variable
Constant = gs.Constant
Body = gs.Graph
"""Body of If, Loop or Scan: a plain graph in `node.attrs`, whose nodes read outer tensors directly."""


@dataclass(frozen=True)
class Normal:
    """Per-channel output statistics of a batch normalization: the distribution over the training data.

    Attributes:
        node: name of the BatchNormalization in the file.
        mean: float64 (C,), along axis 1 of the tensor.
        std: standard deviation, float64 (C,), not negative.
        epsilon: contribution of its epsilon to the variance of its output, float64 (C,).
    """

    node: str
    mean: npt.NDArray[np.float64]
    std: npt.NDArray[np.float64]
    epsilon: npt.NDArray[np.float64]

    def through(self, scale: npt.ArrayLike, shift: npt.ArrayLike = 0.0) -> Normal:
        """Return the statistics of ``scale * tensor + shift``; each () or (C,)."""
        factor = np.broadcast_to(np.asarray(scale, np.float64), self.mean.shape)
        mean = factor * self.mean + np.asarray(shift, np.float64)
        return Normal(self.node, mean, np.abs(factor) * self.std, factor**2 * self.epsilon)


@dataclass
class ModelInfo:
    """Data of a model file other than nodes and tensors. Written back on save.

    The protos are carriers: each has only fields that have no place in the graph (doc strings, metadata,
    device configurations, types that are not tensors), keyed by the name of their owner. Names are unique
    over all scopes; entries of removed nodes and tensors are ignored on save.

    Attributes:
        path: the file, or None for a model in memory.
        files: every file that was read (model and external data): `save` never overwrites them.
        sources: their memory maps.
        ir_version: of the file, raised if the opset needs it.
        original_opset: of the default domain, before conversion.
        metadata: the model's metadata_props; entries added here are saved.
        notes: changes and findings of `load`, one sentence each.
        model: producer, domain, version, doc string.
        nodes, tensors, values: by node, initializer and tensor name.
        graphs: by scope path ("" is the main graph).
        declared: names of the inner tensors whose types the file states; a saved file states those of the same ones.
        overridable: initializers that the file listed among its inputs, and that `load` removed from there.
        default_uses: of those that are meant as defaults of inputs, the number of uses in the loaded graph. `exporter`
            lists those again of which nothing else was computed.
        defaults: their values by name, in memory or in the file (`MappedWeights`).
        normals: batch-norm statistics by tensor name; kept when batch norms are folded. Code that scales a tensor must
            update them (`Normal.through`).
        edits: changes of constants by equalization, see `sbonnx.graph.constant_edits`; saved with a quantized file.
        folded: bytes by which constant folding has made the constants larger.
        broken_rewrites: graph transformers of onnxruntime with which the float model does not run. One list for a graph
            and its pieces: sessions add to it, and leave them out.
    """

    path: Path | None = None
    files: tuple[Path, ...] = ()
    sources: tuple[WeightBytes, ...] = ()
    ir_version: int = 8
    original_opset: int = 0
    metadata: dict[str, str] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    model: onnx.ModelProto = field(default_factory=onnx.ModelProto)
    nodes: dict[str, onnx.NodeProto] = field(default_factory=dict)
    tensors: dict[str, onnx.TensorProto] = field(default_factory=dict)
    values: dict[str, onnx.ValueInfoProto] = field(default_factory=dict)
    graphs: dict[str, onnx.GraphProto] = field(default_factory=dict)
    declared: frozenset[str] = frozenset()
    overridable: tuple[str, ...] = ()
    default_uses: dict[str, int] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    normals: dict[str, Normal] = field(default_factory=dict)
    edits: Edits = field(default_factory=dict)
    folded: int = 0
    broken_rewrites: list[str] = field(default_factory=list)


class Graph(gs.Graph):  # type: ignore[misc]
    """The main graph of a model. Bodies of If, Loop and Scan are plain `Body` graphs in `node.attrs`.

    Invariants after `load`, which every edit must preserve: node names are unique and not empty, tensor names are
    unique over all scopes, every output of a body is computed or constant inside that body.
    """

    info: ModelInfo

    def __init__(
        self,
        nodes: Sequence[Any] = (),
        inputs: Sequence[Any] = (),
        outputs: Sequence[Any] = (),
        *,
        name: str = "graph",
        opset: int = 13,
        import_domains: Sequence[onnx.OperatorSetIdProto] = (),
        info: ModelInfo | None = None,
    ) -> None:
        self.info = info if info is not None else ModelInfo(original_opset=opset)
        domains = list(import_domains) or [onnx.helper.make_opsetid("", opset)]
        super().__init__(list(nodes), list(inputs), list(outputs), name=name, opset=opset, import_domains=domains)


def set_node_metadata(graph: Graph, node_name: str, key: str, value: str) -> None:
    """Set one entry of a node's metadata_props.

    It is saved with the model: at the node from IR version 10 on. Below, keys that begin with "sbonnx." are saved in
    the metadata of the model, and others raise the IR version.
    """
    carrier = graph.info.nodes.setdefault(node_name, onnx.NodeProto())
    for entry in carrier.metadata_props:
        if entry.key == key:
            entry.value = value
            return
    carrier.metadata_props.add(key=key, value=value)


def node_metadata(graph: Graph, node_name: str) -> dict[str, str]:
    """Return the metadata_props of a node as a new dict."""
    carrier = graph.info.nodes.get(node_name)
    return {} if carrier is None else {entry.key: entry.value for entry in carrier.metadata_props}


DEBUG_METADATA: Final = ("pkg.torch.onnx.", "pkg.torch.export.", "pkg.onnxscript.")
"""Prefixes of metadata that exporters write for debugging: stack traces, classes, nodes of the traced program."""

MODULE_PATHS: Final = "pkg.torch.onnx.name_scopes"
"""Metadata of torch's exporter that patterns of recipes read (`sbonnx.recipe.torch_modules`)."""

TORCH_NAMESPACE: Final = "namespace"
"""Key without a prefix that torch's exporter adds to a node: classes of the modules around it."""


def drop_debug_metadata(graph: Graph) -> int:
    """Remove the debug metadata of exporters from nodes, tensors, values and scopes; return the number of its bytes.

    Entries of others, and those that sbonnx reads, stay. Stack traces name folders of the machine of the export, and
    in files of small quantized models they are most bytes.
    """
    info, total = graph.info, 0

    def cleaned(carriers: dict[str, Any]) -> dict[str, Any]:
        nonlocal total
        cleaned_carriers = {}
        for name, carrier in carriers.items():
            keys = {entry.key for entry in carrier.metadata_props}
            dropped = {key for key in keys if key.startswith(DEBUG_METADATA) and key != MODULE_PATHS}
            dropped |= {TORCH_NAMESPACE} & keys if dropped else set()
            if dropped:
                kept = [entry for entry in carrier.metadata_props if entry.key not in dropped]
                before, shared, carrier = carrier.ByteSize(), carrier, type(carrier)()
                carrier.CopyFrom(shared)  # the original graph has it too
                del carrier.metadata_props[:]
                carrier.metadata_props.extend(kept)
                total += before - carrier.ByteSize()
            cleaned_carriers[name] = carrier
        return cleaned_carriers

    info.nodes, info.tensors = cleaned(info.nodes), cleaned(info.tensors)
    info.values, info.graphs = cleaned(info.values), cleaned(info.graphs)
    return total
