"""`GraphVisitor`: hooks on the nodes of a `QuantModel`, and a store for what they find.

    def hook_wrapper(node, module, storage):
        def hook(module, inputs, output):
            storage.set_value(node.name, "absmax", float(abs(output).max()))
        return [module.register_forward_hook(hook)]

    with GraphVisitor(model, hook_wrapper) as visitor:
        model(images)
        largest = visitor.storage.extract_value("absmax")

Hooks see the values that a call of the model computes, with what `set_quant` applies, as arrays. Unlike torch's they
run after the call, in the order of the graph, and change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, final

from sbonnx.graph import Constant, Graph, Node
from sbonnx.graph.query import producer
from sbonnx.spec import Array

if TYPE_CHECKING:
    from sbonnx.quant_model.life_cycle import QuantModel

OUTPUT: Final = "output"
"""The name that stands for outputs in `SharedData`, and for no other value."""

PreHook = Callable[["VisitedModule", tuple[Array, ...]], object]
Hook = Callable[["VisitedModule", tuple[Array, ...], Any], object]


@final
@dataclass(frozen=True)
class VisitedNode:
    """A node of the graph.

    Attributes:
        name: its name; `target` is the same.
        op: its operator type.
        args: for each input that is no constant, the node that makes it, or the name of the graph input.
    """

    name: str
    op: str
    args: tuple[str, ...]

    @property
    def target(self) -> str:
        """The name, as torch.fx has it."""
        return self.name

    @property
    def kwargs(self) -> dict[str, Any]:
        """Nothing: inputs of operators have places."""
        return {}


@final
@dataclass(frozen=True)
class Handle:
    """Takes a hook away again."""

    hooks: Hooks
    number: int

    def remove(self) -> None:
        """Call the hook no more."""
        self.hooks.remove(self.number)


@final
@dataclass(frozen=True)
class VisitedModule:
    """Registry of the hooks on one node."""

    node: VisitedNode
    hooks: Hooks

    def register_forward_pre_hook(self, hook: PreHook) -> Handle:
        """Call ``hook(module, inputs)`` for each call of the model."""
        return self.hooks.add(self, "before", hook)

    def register_forward_hook(self, hook: Hook) -> Handle:
        """Call ``hook(module, inputs, output)`` for each call of the model; a tuple where there are several outputs."""
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
        """Take a hook away; nothing where it is gone."""
        self._hooks.pop(number, None)

    def tensors(self, graph: Graph) -> list[str]:
        """The tensors of the main graph that the hooks see."""
        names = {module.node.name for module, _, _ in self._hooks.values()}
        inputs = {tensor.name for tensor in graph.inputs}
        wanted: dict[str, None] = {}
        for node in graph.nodes:
            if node.name in names:
                tensors = [*_variables(node), *(tensor for tensor in node.outputs if not tensor.is_empty())]
                wanted |= dict.fromkeys(tensor.name for tensor in tensors if tensor.name not in inputs)
        return list(wanted)

    def fire(self, graph: Graph, known: Mapping[str, Any]) -> None:
        """Call the hooks on the values of one call, in the order of the graph."""
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
    """The inputs of a node that are no constants."""
    return [tensor for tensor in node.inputs if not isinstance(tensor, Constant) and not tensor.is_empty()]


@dataclass
class SharedData:
    """Outputs and named values by node, while a graph is walked.

    An output is let go when the last node that reads it is finished.

    Attributes:
        outputs: by node.
        edges: the nodes that each node reads.
        output_degrees: how many nodes that are not finished read each node.
        values: by name of the value, then by node.
    """

    outputs: dict[str, Any] = field(default_factory=dict)
    edges: dict[str, list[str]] = field(default_factory=dict)
    output_degrees: dict[str, int] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add_node(self, name: str, inputs: Sequence[str | None]) -> None:
        """Enter a node that reads these nodes; after them."""
        self.output_degrees.setdefault(name, 0)
        self.edges[name] = [one for one in inputs if one is not None]
        for one in self.edges[name]:
            self.output_degrees[one] = self.output_degrees.get(one, 0) + 1

    def finish_node(self, name: str) -> None:
        """A node was run: let go of the outputs that nobody reads any more."""
        for one in self.edges[name]:
            self.output_degrees[one] -= 1
        for one in (*self.edges[name], name):
            if self.output_degrees.get(one) == 0:
                del self.output_degrees[one]
                self.outputs.pop(one, None)

    def set_output(self, name: str, value: Any) -> None:
        """Keep the output of a node."""
        self.outputs[name] = value

    def get_output(self, name: str) -> Any:
        """The output of a node, or None."""
        return self.outputs.get(name)

    def set_value(self, name: str, value_name: str, value: Any) -> None:
        """Keep a value of a node under a name, which may not be "output".

        Raises:
            ValueError: it is.
        """
        self._require_value(value_name)
        self.values.setdefault(value_name, {})[name] = value

    def get_value(self, name: str, value_name: str) -> Any:
        """The value of a node under a name, or None."""
        self._require_value(value_name)
        return self.values.get(value_name, {}).get(name)

    def extract_value(self, value_name: str) -> dict[str, Any]:
        """The values under a name by node, which are taken out."""
        return self.values.pop(value_name, {})

    def extract_node_args(self, args: Any, real_input: Any = None, batch: int | None = None) -> Any:
        """The outputs that arguments stand for, in tuples, lists and dicts as they are.

        Args:
            args: names of nodes; what is no text is given back.
            real_input: in the same form, what to take where a node has no output here.
            batch: place in an output that is a list of batches.
        """
        if isinstance(args, str):
            found = self.outputs.get(args)
            value = real_input if found is None else found
            return value if batch is None else value[batch]
        if isinstance(args, Mapping):
            inputs = real_input or {}
            return {name: self.extract_node_args(one, inputs.get(name), batch) for name, one in args.items()}
        if isinstance(args, (list, tuple)):
            given = real_input if real_input is not None else [None] * len(args)
            made = [self.extract_node_args(one, known, batch) for one, known in zip(args, given, strict=False)]
            return tuple(made) if isinstance(args, tuple) else made
        return args

    extract_node_kwargs = extract_node_args

    @staticmethod
    def _require_value(value_name: str) -> None:
        if value_name == OUTPUT:
            raise ValueError("'output' is no name for a value: use set_output and get_output")


class GraphVisitor:
    """Hooks on every node of the main graph of a model, until `remove`, or the end of a with block.

    Args:
        model: whose calls are watched.
        hook_wrapper: called once a node as ``hook_wrapper(node=, module=, storage=)``; registers hooks on `module` and
            returns their handles, or None.

    Attributes:
        storage: for what the hooks find; nodes and edges are entered.
        handles: of all hooks.
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
        """Take all hooks away."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def __enter__(self) -> GraphVisitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()
