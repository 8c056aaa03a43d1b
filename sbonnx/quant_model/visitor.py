"""`GraphVisitor`: forward hooks on the nodes of a `QuantModel`, and a store for their results.

    def hook_wrapper(node, module, storage):
        def hook(module, inputs, output):
            storage.set_value(node.name, "absmax", float(abs(output).max()))
        return [module.register_forward_hook(hook)]

    with GraphVisitor(model, hook_wrapper) as visitor:
        model(images)
        largest = visitor.storage.extract_value("absmax")

Hooks receive the values that a call of the model computes, with quantization as set by `set_quant`, as arrays. Unlike
torch hooks they run after the call, in graph order, and cannot modify values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, final

from sbonnx.graph import Constant, Graph, Node
from sbonnx.graph.query import producer
from sbonnx.spec import Array

if TYPE_CHECKING:
    from sbonnx.quant_model.life_cycle import QuantModel

OUTPUT: Final = "output"
"""Reserved name of outputs in `SharedData`; not allowed for other values."""

PreHook = Callable[["VisitedModule", tuple[Array, ...]], object]
Hook = Callable[["VisitedModule", tuple[Array, ...], Any], object]


@final
@dataclass(frozen=True)
class VisitedNode:
    """Description of a graph node, with the attributes of a torch.fx node.

    Attributes:
        name: name of the node, same as `target`.
        op: operator type.
        args: for each non-constant input, the name of the producing node or of the graph input.
    """

    name: str
    op: str
    args: tuple[str, ...]

    @property
    def target(self) -> str:
        """The node name, under the attribute name of torch.fx."""
        return self.name

    @property
    def kwargs(self) -> dict[str, Any]:
        """Empty dict: ONNX operators have only positional inputs."""
        return {}


@final
@dataclass(frozen=True)
class Handle:
    """Handle that removes a hook."""

    hooks: Hooks
    number: int

    def remove(self) -> None:
        """Unregister the hook."""
        self.hooks.remove(self.number)


@final
@dataclass(frozen=True)
class VisitedModule:
    """One node on which hooks can be registered."""

    node: VisitedNode
    hooks: Hooks

    def register_forward_pre_hook(self, hook: PreHook) -> Handle:
        """Call ``hook(module, inputs)`` for each call of the model."""
        return self.hooks.add(self, "before", hook)

    def register_forward_hook(self, hook: Hook) -> Handle:
        """Call ``hook(module, inputs, output)`` for each call of the model; several outputs are passed as a tuple."""
        return self.hooks.add(self, "after", hook)


class Hooks:
    """The hooks of one model."""

    def __init__(self) -> None:
        self._hooks: dict[int, tuple[VisitedModule, str, Callable[..., object]]] = {}
        self._next = 0

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def add(self, module: VisitedModule, when: str, hook: Callable[..., object]) -> Handle:
        """Register a hook "before" or "after" a node."""
        self._next += 1
        self._hooks[self._next] = (module, when, hook)
        return Handle(self, self._next)

    def remove(self, number: int) -> None:
        """Remove a hook; no-op if it is already removed."""
        self._hooks.pop(number, None)

    def tensors(self, graph: Graph) -> list[str]:
        """Return the names of the main graph's tensors that the hooks read."""
        names = {module.node.name for module, _, _ in self._hooks.values()}
        inputs = {tensor.name for tensor in graph.inputs}
        wanted: dict[str, None] = {}
        for node in graph.nodes:
            if node.name in names:
                tensors = [*_variables(node), *(tensor for tensor in node.outputs if not tensor.is_empty())]
                wanted |= dict.fromkeys(tensor.name for tensor in tensors if tensor.name not in inputs)
        return list(wanted)

    def fire(self, graph: Graph, known: Mapping[str, Any]) -> None:
        """Call the hooks with the values of one model call, in graph order."""
        by_node: dict[str, list[tuple[VisitedModule, str, Callable[..., object]]]] = {}
        for entry in self._hooks.values():
            by_node.setdefault(entry[0].node.name, []).append(entry)
        for node in graph.nodes:
            outputs = tuple(known[tensor.name] for tensor in node.outputs if tensor.name in known)
            for module, when, hook in by_node.get(node.name, ()):
                values = tuple(known[tensor.name] for tensor in _variables(node) if tensor.name in known)
                if when == "before":
                    hook(module, values)
                else:
                    hook(module, values, outputs[0] if len(outputs) == 1 else outputs)


def _variables(node: Node) -> list[Any]:
    return [tensor for tensor in node.inputs if not isinstance(tensor, Constant) and not tensor.is_empty()]


@dataclass
class SharedData:
    """Outputs and named values by node during a graph traversal, with reference counting.

    An output is released when the last node that reads it is finished.

    Attributes:
        outputs: by node.
        edges: the nodes that each node reads.
        output_degrees: number of unfinished readers of each node.
        values: by name of the value, then by node.
    """

    outputs: dict[str, Any] = field(default_factory=dict)
    edges: dict[str, list[str]] = field(default_factory=dict)
    output_degrees: dict[str, int] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add_node(self, name: str, inputs: Sequence[str | None]) -> None:
        """Register a node and the nodes that it reads, which must be registered first."""
        self.output_degrees.setdefault(name, 0)
        self.edges[name] = [edge for edge in inputs if edge is not None]
        for edge in self.edges[name]:
            self.output_degrees[edge] = self.output_degrees.get(edge, 0) + 1

    def finish_node(self, name: str) -> None:
        """Mark a node as finished and release outputs without remaining readers."""
        for edge in self.edges[name]:
            self.output_degrees[edge] -= 1
        for edge in (*self.edges[name], name):
            if self.output_degrees.get(edge) == 0:
                del self.output_degrees[edge]
                self.outputs.pop(edge, None)

    def set_output(self, name: str, value: Any) -> None:
        """Store the output of a node."""
        self.outputs[name] = value

    def get_output(self, name: str) -> Any:
        """Return the output of a node, or None."""
        return self.outputs.get(name)

    def set_value(self, name: str, value_name: str, value: Any) -> None:
        """Store a named value of a node.

        Raises:
            ValueError: the name is the reserved "output".
        """
        self._require_value(value_name)
        self.values.setdefault(value_name, {})[name] = value

    def get_value(self, name: str, value_name: str) -> Any:
        """Return a named value of a node, or None."""
        self._require_value(value_name)
        return self.values.get(value_name, {}).get(name)

    def extract_value(self, value_name: str) -> dict[str, Any]:
        """Remove and return the values under a name, by node."""
        return self.values.pop(value_name, {})

    def extract_node_args(self, args: Any, real_input: Any = None, batch: int | None = None) -> Any:
        """Replace node names by their outputs in nested tuples, lists and dicts.

        Args:
            args: names of nodes; values that are not strings are returned unchanged.
            real_input: fallback values of the same structure, for nodes without a stored output.
            batch: index into outputs that are lists of batches.
        """
        if isinstance(args, str):
            stored = self.outputs.get(args)
            value = real_input if stored is None else stored
            return value if batch is None else value[batch]
        if isinstance(args, Mapping):
            inputs = real_input or {}
            return {name: self.extract_node_args(arg, inputs.get(name), batch) for name, arg in args.items()}
        if isinstance(args, (list, tuple)):
            given = real_input if real_input is not None else [None] * len(args)
            values = [
                self.extract_node_args(arg, given_value, batch) for arg, given_value in zip(args, given, strict=False)
            ]
            return tuple(values) if isinstance(args, tuple) else values
        return args

    extract_node_kwargs = extract_node_args

    @staticmethod
    def _require_value(value_name: str) -> None:
        if value_name == OUTPUT:
            raise ValueError("'output' is no name for a value: use set_output and get_output")


class GraphVisitor:
    """Registers hooks on every node of a model's main graph, until `remove` or the end of a with block.

    Args:
        model: the model to hook.
        hook_wrapper: called once per node as ``hook_wrapper(node=, module=, storage=)``; registers hooks on `module`
            and returns their handles, or None.

    Attributes:
        storage: store for the results of hooks; nodes and edges are already registered.
        handles: handles of all hooks.
    """

    def __init__(self, model: QuantModel, hook_wrapper: Callable[..., Sequence[Handle] | None]) -> None:
        self.storage = SharedData()
        self.handles: list[Handle] = []
        for node in model.prepared.graph.nodes:
            sources = [(tensor.name, producer(tensor)) for tensor in _variables(node)]
            args = tuple(name if source is None else source.name for name, source in sources)
            visited = VisitedNode(node.name, node.op, args)
            self.storage.add_node(node.name, [source.name for _, source in sources if source is not None])
            module = VisitedModule(visited, model.hooks)
            self.handles.extend(hook_wrapper(node=visited, module=module, storage=self.storage) or ())

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def __enter__(self) -> GraphVisitor:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()
