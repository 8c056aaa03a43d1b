"""onnxruntime: ops that stay float, counted in the optimized graph that onnxruntime creates from the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

from sbonnx import graph as graphs
from sbonnx.errors import DeviceError, SbonnxError
from sbonnx.graph import Constant, Graph, Node, query
from sbonnx.graph.storage.temporary import temporary_folder
from sbonnx.lint.view import View
from sbonnx.ops import DEQUANTIZE, QDQ, QUANTIZE
from sbonnx.runtime import open_session, session_options

Found = Iterator[tuple[str, str, str]]
Check = Callable[[View], Iterable[tuple[str, str, str]]]


@dataclass(frozen=True)
class Counted:
    """Result of loading a model in onnxruntime and reading its optimized graph.

    Attributes:
        graph: the optimized graph, or None.
        refused: reason why onnxruntime rejects the model, or "".
        skipped: reason why nothing could be counted, or "".
    """

    graph: Graph | None = None
    refused: str = ""
    skipped: str = ""


_COUNTED: Final[WeakKeyDictionary[View, Counted]] = WeakKeyDictionary()
"""Cache: three rules share one session."""


def counted(view: View) -> Counted:
    """Return the optimized graph of the model, cached per view."""
    if view not in _COUNTED:
        _COUNTED[view] = _count(view)
    return _COUNTED[view]


def _count(view: View) -> Counted:
    try:
        # kernels are selected at this level; the next one also converts data layouts, which hides ops that stay float
        options = session_options("extended")
    except DeviceError as error:
        return Counted(skipped=str(error))
    with temporary_folder() as folder:
        source, target = folder / "model.onnx", folder / "optimised.onnx"
        options.optimized_model_filepath = str(target)
        try:
            graphs.save(view.graph, source)
        except SbonnxError as error:
            return Counted(skipped=str(error))
        try:
            open_session(str(source), options)
        except Exception as error:  # onnxruntime's own exceptions share no base class
            said = " ".join(str(error).replace(f"Load model from {source} failed:", "").split())
            return Counted(refused=said.replace(str(source), "the model"))
        return Counted(graph=graphs.load(target, opset=1))


def refused(view: View) -> Found:
    """Report that onnxruntime does not load the model."""
    why = counted(view).refused
    if why:
        yield "", "", why


def not_counted(view: View) -> Found:
    """Report that the kernels could not be counted."""
    why = counted(view).skipped
    if why:
        yield "", "", f"the kernels were not counted: {why}"


def stays_float(checks: tuple[Check, ...]) -> Check:
    """Create the rule for ops left between pairs in the optimized graph for which none of `checks` gives a reason."""

    def check(view: View) -> Found:
        graph = counted(view).graph
        left = [] if graph is None else list(_between_pairs(graph))
        if not left:
            return
        makers = {tensor.name: node for node in view.nodes for tensor in node.outputs}
        named = {name for one in checks for name, _, _ in one(view) if name}
        for node, output in left:
            origin = makers.get(output)
            chain = [] if origin is None else _chain(origin)
            if not named & {node.name, *(str(one.name) for one in chain)}:
                kernel = f"{node.domain}:{node.op}" if node.domain else node.op
                why = f"onnxruntime runs {kernel} in float, behind a DequantizeLinear"
                if any(_signed(view, one) for one in chain[:1]):
                    why += "; it rewrites some int8 pairs to uint8, which splits the types around an op"
                yield str((origin or node).name), output, why

    return check


def _chain(node: Node) -> list[Node]:
    """Return a node, the ops that may have been fused into it, and the pairs before it, which other rules may name."""
    found, stack, seen = [], [node], {id(node)}
    while stack:
        one = stack.pop()
        found.append(one)
        for tensor in () if one.op in QUANTIZE else one.inputs:
            maker = query.producer(tensor)
            if maker is not None and id(maker) not in seen:
                seen.add(id(maker))
                stack.append(maker)
    return found


def _signed(view: View, node: Node) -> bool:
    """Return whether a node reads an int8 pair."""
    read = (view.quantizer_of(tensor) for tensor in node.inputs)
    return any(one is not None and one.codes == "int8" and view.is_activation_pair(one) for one in read)


def _between_pairs(graph: Graph) -> Iterator[tuple[Node, str]]:
    """Yield float ops of an optimized graph that read a dequantized activation, and either a weight or write to a Q."""
    for node in query.all_nodes(graph):
        read = [maker for maker in map(query.producer, node.inputs) if maker is not None and maker.op in DEQUANTIZE]
        stored = [maker for maker in read if isinstance(maker.inputs[0], Constant)]
        if node.op in QDQ or len(read) == len(stored) or not node.outputs:
            continue
        written = [out for out in node.outputs if any(one.op in QUANTIZE for one, _ in query.readers(out))]
        if written or stored:
            yield node, str((written or node.outputs)[0].name)
