"""Names of torch modules for the nodes of an exported file, in Sparsebit's naming of layers.

A node of a file that torch exported belongs to a module. Its path comes from, in this order:

1. the metadata ``pkg.torch.onnx.name_scopes`` (exporter on torch.export): ``['', 'layer1', 'layer1.0', 'relu_1']``;
2. the name of the node (exporter on TorchScript): ``/layer1/layer1.0/conv1/Conv``;
3. the name of its weight: ``layer1.0.conv1.weight``.

Sparsebit names a module without submodules by its path, dots as underscores (``layer1_0_conv1``), and its second
call ``layer1_0_relu_1``. Functions and operators have the names that torch.fx gives them (`FUNCTIONS`), numbered in
the order of the file: ``add``, ``add_1``, ``softmax``. Nodes that compute integers are not counted.
"""

from __future__ import annotations

import ast
import fnmatch
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from sbonnx.graph.model import MODULE_PATHS

SCOPES: Final = MODULE_PATHS
"""Metadata of torch's exporter: paths of the modules around a node, outermost first, then the node's own name."""

MAX_SCOPES: Final = 20_000
"""Maximum characters of that metadata."""

FUNCTIONS: Final = {
    "Add": "add",
    "Sub": "sub",
    "Mul": "mul",
    "Div": "truediv",
    "MatMul": "matmul",
    "Softmax": "softmax",
    "LogSoftmax": "log_softmax",
    "ReduceMean": "mean",
    "Relu": "relu",
    "LeakyRelu": "leaky_relu",
    "HardSigmoid": "hardsigmoid",
    "HardSwish": "hardswish",
    "Clip": "clamp",
    "Erf": "gelu",
    "Concat": "cat",
    "Resize": "interpolate",
    "MaxPool": "max_pool2d",
    "AveragePool": "avg_pool2d",
    "GlobalAveragePool": "adaptive_avg_pool2d",
    "LayerNormalization": "layer_norm",
    "Conv": "conv2d",
    "Gemm": "linear",
}
"""Names that torch.fx gives to functions, by operator; others have the operator's name in lower case."""

_OPERATOR = re.compile(r"[A-Z][A-Za-z0-9]*(_\d+)?")
_WILDCARDS: Final = frozenset("*?[")


@dataclass(frozen=True)
class NodeInfo:
    """Node of the original file.

    Attributes:
        name, op: original name and operator type.
        metadata: its metadata_props.
        weight: name of its weight if that ends in ``.weight``, else "".
        integer: it computes integers, such as sizes; the exporter adds most of these nodes.
        inputs, outputs: names of the tensors that it reads and writes. A node with bodies also reads what they return.
        channels: number of output channels of its constant weight; 0 if it is no linear layer.
    """

    name: str
    op: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    weight: str = ""
    integer: bool = False
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    channels: int = 0

    @property
    def linear(self) -> bool:
        """Whether it is a convolution or product with a constant weight."""
        return self.channels > 0


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module or function.

    Attributes:
        name: Sparsebit's name.
        path: path of the module, with dots; "" for a function.
        nodes: names of its nodes.
    """

    name: str
    path: str
    nodes: tuple[str, ...]


def module_path(node: NodeInfo) -> str | None:
    """Return the path of the module of a node, "" for the outermost one, or None if unknown."""
    scopes = _scopes(node.metadata.get(SCOPES, ""))
    if scopes:
        return scopes[-2] if len(scopes) > 1 else ""
    if node.name.startswith("/"):
        *segments, last = node.name[1:].split("/")
        if _OPERATOR.fullmatch(last):
            return _joined(segments)
    if node.weight:
        return node.weight.removesuffix(".weight")
    return None


def module_titles(node: NodeInfo) -> tuple[str, ...]:
    """Return short names of the modules that contain a node, outermost first; empty if its file names none.

    Names of other exporters that have slashes count too. A number follows the name of its list: ``layer1.0``.
    """
    scopes = _scopes(node.metadata.get(SCOPES, ""))
    paths = scopes[1:-1] if scopes else [part for part in node.name.split("/")[:-1] if part]
    return tuple(_title(*pair) for pair in zip(["", *paths[:-1]], paths, strict=True)) if paths else ()


def _title(outer: str, inner: str) -> str:
    short = inner.removeprefix(f"{outer}.") if outer else inner
    return inner.rpartition(".")[0].rpartition(".")[2] + f".{short}" if short.isdigit() and outer else short


def _scopes(text: str) -> list[str]:
    """Parse the paths in the exporter's metadata; empty if it has another format."""
    if not text.startswith("[") or len(text) > MAX_SCOPES:
        return []
    try:
        scopes = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return []
    return [str(scope) for scope in scopes] if isinstance(scopes, list) else []


def _joined(segments: Sequence[str]) -> str:
    """Join ``["layer1", "layer1.0", "conv1"]`` to ``layer1.0.conv1``: children repeat the name of their container."""
    parts: list[str] = []
    for segment in segments:
        if parts and segment.startswith(f"{parts[-1]}."):
            parts[-1] = segment
        else:
            parts.append(segment)
    return ".".join(parts)


class Modules:
    """Layers of a file, and the modules that contain them; computed on first use.

    Attributes:
        names: names of all nodes.
    """

    def __init__(self, nodes: Sequence[NodeInfo]) -> None:
        self._nodes = tuple(nodes)
        self.names = tuple(node.name for node in nodes)

    @cached_property
    def _paths(self) -> dict[str, str]:
        """Module path of each node; empty if the file has no module information."""
        paths = {node.name: module_path(node) for node in self._nodes}
        any_path = any(path is not None for path in paths.values())
        return {name: path or "" for name, path in paths.items()} if any_path else {}

    @cached_property
    def containers(self) -> Mapping[str, Sequence[str]]:
        """Names of the nodes in and below each module, by its path."""
        names_by_prefix: dict[str, list[str]] = {}
        for name, path in self._paths.items():
            for prefix in _prefixes(path):
                names_by_prefix.setdefault(prefix, []).append(name)
        return names_by_prefix

    @cached_property
    def layers(self) -> tuple[ModuleCall, ...]:
        """Calls of modules without submodules, and of functions, in the order of the file."""
        inner = {path.rpartition(".")[0] for path in self.containers}
        direct: dict[str, list[NodeInfo]] = {}
        functions = []
        for node in self._nodes if self._paths else ():
            path = self._paths[node.name]
            if path in inner or not path:
                functions += [] if node.integer else [node]
            else:
                direct.setdefault(path, []).append(node)
        return (*(layer for path, nodes in direct.items() for layer in _calls(path, nodes)), *_functions(functions))

    def find(self, pattern: str, *, containers_first: bool = False) -> list[ModuleCall]:
        """Return the layers that a pattern matches; or the modules, each with all nodes in and below it.

        Args:
            pattern: Sparsebit's name or the path of a module, wildcards allowed.
            containers_first: try modules before layers, as for SKIP_TRACE_MODULES.
        """
        covers = re.compile(fnmatch.translate(pattern)).fullmatch
        layers = [layer for layer in self.layers if covers(layer.name) or (layer.path and covers(layer.path))]
        modules = [
            ModuleCall(path.replace(".", "_"), path, tuple(nodes))
            for path, nodes in self.containers.items()
            if covers(path) or covers(path.replace(".", "_"))
        ]
        return (modules or layers) if containers_first else (layers or modules)


def candidates(pattern: str, layers: Sequence[ModuleCall]) -> list[str]:
    """Return the modules and functions that a name without wildcards could mean; empty if it is unique."""
    if _WILDCARDS & set(pattern):
        return []
    paths = [layer.path or f"{layer.name} (a function)" for layer in layers]
    return list(dict.fromkeys(paths)) if len(set(paths)) > 1 else []


def _prefixes(path: str) -> Iterator[str]:
    """Yield ``a``, ``a.b``, ``a.b.c`` for ``a.b.c``; nothing for ""."""
    parts = path.split(".") if path else []
    yield from (".".join(parts[:length]) for length in range(1, len(parts) + 1))


def _calls(path: str, nodes: Sequence[NodeInfo]) -> Iterator[ModuleCall]:
    """Yield the calls of one module without submodules: one per node if all have one operator, else a single one."""
    name = path.replace(".", "_")
    if len({node.op for node in nodes}) > 1:
        yield ModuleCall(name, path, tuple(node.name for node in nodes))
        return
    for count, node in enumerate(nodes):
        yield ModuleCall(f"{name}_{count}" if count else name, path, (node.name,))


def _functions(nodes: Sequence[NodeInfo]) -> Iterator[ModuleCall]:
    counts: Counter[str] = Counter()
    for node in nodes:
        name = FUNCTIONS.get(node.op, node.op.lower())
        yield ModuleCall(f"{name}_{counts[name]}" if counts[name] else name, "", (node.name,))
        counts[name] += 1
