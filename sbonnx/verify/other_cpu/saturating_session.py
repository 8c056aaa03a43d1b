"""Sessions that compute the sums of x86 CPUs without 8-bit dot products on a CPU that has them.

The graph that onnxruntime makes of the file is cut before and after the kernels whose sums can saturate. Those are
computed in numpy (`saturating_sums`), the pieces between them by onnxruntime. Bodies of If are cut as well, those of
Loop and Scan are not.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import onnx
from onnx import helper, numpy_helper

from sbonnx.backends.onnxruntime.graph_transformers import original_name
from sbonnx.graph.protos import body_protos, needs
from sbonnx.spec import Array
from sbonnx.system.runtime import open_session, session_options
from sbonnx.verify.other_cpu.saturating_sums import LAYOUTS, can_saturate, compute

NOT_COMPUTED: Final = frozenset({"QAttention", "DynamicQuantizeLSTM", "QMoE"})
"""Operators of onnxruntime that multiply uint8 by int8 codes inside, and are not computed in numpy."""

Tensors = Mapping[str, Any]

Constants = Mapping[str, onnx.TensorProto]

Step = Callable[[Tensors], Sequence[Any]]
"""Computes the outputs of a node from tensors by name."""


class SaturatingSession:
    """Session of a model with saturating sums; it has what comparisons use of onnxruntime's.

    Attributes:
        computed: names of the nodes whose sums can saturate, and are computed in numpy.
        unknown: names of the nodes whose sums can saturate, and are exact.
    """

    def __init__(self, opened: Any, path: Path, threads: int | None) -> None:
        """Cut a model.

        Args:
            opened: session of the whole model.
            path: the graph that onnxruntime made of it, with its weights next to it, until the session is closed.
                Pieces are written there.
            threads: threads inside operators; None: number of cores.
        """
        self._inputs, self._outputs = (
            [SimpleNamespace(name=entry.name, type=entry.type, shape=entry.shape) for entry in entries]
            for entries in (opened.get_inputs(), opened.get_outputs())
        )
        self._model = onnx.load(str(path), load_external_data=False)
        self._path, self._threads, self._pieces = path, threads, count()
        self.computed: list[str] = []
        self.unknown: list[str] = []
        self._main = _Subgraph(self, self._model.graph, {}, ())

    def get_inputs(self) -> list[Any]:
        """Return name, type and shape of each input."""
        return self._inputs

    def get_outputs(self) -> list[Any]:
        """Return name, type and shape of each output."""
        return self._outputs

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, Any]) -> list[Any]:
        """Run the model, as onnxruntime's sessions do."""
        every = [entry.name for entry in self._outputs]
        outputs = dict(zip(every, self._main.run(feeds), strict=True))
        return [outputs[name] for name in names or every]

    def open_piece(
        self, nodes: Sequence[onnx.NodeProto], constants: Constants, given: Tensors, outputs: Sequence[str]
    ) -> Any:
        """Open a session of some nodes. `given`: what they read, of any values; `outputs`: what others read."""
        model = onnx.ModelProto(ir_version=self._model.ir_version, opset_import=self._model.opset_import)
        model.functions.extend(self._model.functions)
        model.graph.name = "piece"
        model.graph.node.extend(nodes)
        read = dict.fromkeys(name for node in nodes for name in reads_of(node))
        model.graph.initializer.extend(constants[name] for name in read if name in constants)
        by_axis = {name for node in nodes if node.op_type == "Resize" for name in node.input[1:]}
        for name, value in given.items():
            kind = helper.np_dtype_to_tensor_dtype(np.asarray(value).dtype)
            # shape inference of Resize reads an unknown number of sizes as 0
            shape = list(np.shape(value)) if name in by_axis else [None] * np.ndim(value)
            model.graph.input.append(helper.make_tensor_value_info(name, kind, shape))
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
        path = self._path.with_name(f"{self._path.stem}-{next(self._pieces)}.onnx")
        onnx.save(model, str(path))
        return open_session(str(path), session_options("kept", threads=self._threads))

    def value(self, constant: onnx.TensorProto) -> Array:
        """Return the values of a constant."""
        return np.asarray(numpy_helper.to_array(constant, base_dir=str(self._path.parent)))

    def saturates(self, node: onnx.NodeProto, constants: Constants) -> bool:
        """Return whether sums of a node can saturate; they can with a computed weight if its type is not known."""
        kinds = [constants[name].data_type if name in constants else None for name in node.input]
        if node.op_type in NOT_COMPUTED:
            return onnx.TensorProto.INT8 in kinds
        if node.op_type not in LAYOUTS:
            return False
        for (codes, _, zero), kind in zip(
            LAYOUTS[node.op_type].data, (onnx.TensorProto.UINT8, onnx.TensorProto.INT8), strict=True
        ):
            if {kinds[at] for at in (codes, zero) if at < len(kinds)} - {None, kind}:
                return False
        weight = constants.get(node.input[LAYOUTS[node.op_type].data[1][0]])
        return weight is None or can_saturate(node.op_type, attributes_of(node), self.value(weight))


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """Return the values of a node's attributes by name, texts as str."""
    values = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}


def reads_of(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the names that a node reads, also in its bodies."""
    yield from needs(node)


@dataclass
class _SessionStage:
    """Nodes that run in one session, then nodes that are computed in numpy.

    Attributes:
        nodes, steps: both.
        inputs, outputs: tensors that the session reads and returns.
        unused: tensors that no later stage reads.
        session: opened when it is first run, because only then the types of its inputs are known.
    """

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    steps: list[tuple[onnx.NodeProto, Step]] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    session: Any = None


class _Subgraph:
    """The main graph or a body of If, in stages.

    Args:
        owner: the session.
        graph: the graph or body.
        outer: constants of the enclosing graphs.
        visible: other tensors of the enclosing graphs.
    """

    def __init__(
        self, owner: SaturatingSession, graph: onnx.GraphProto, outer: Constants, visible: Collection[str]
    ) -> None:
        own = {tensor.name: tensor for tensor in graph.initializer}
        inputs = [value.name for value in graph.input]
        self.owner = owner
        self.defaults = {name: own.pop(name) for name in inputs if name in own}
        self.constants: Constants = {**outer, **own}
        self.outputs = [value.name for value in graph.output]
        self.stages: list[_SessionStage] = []
        depths = dict.fromkeys([*visible, *inputs], 0)
        last: dict[str, int] = {}
        makers: dict[str, _SessionStage] = {}
        for node in _simplified(graph.node):
            read = [name for name in reads_of(node) if name in depths]
            depth = max((depths[name] for name in read), default=0)
            last.update((name, depth) for name in read if depth >= last.get(name, 0))
            self.stages += [_SessionStage() for _ in range(len(self.stages), depth + 1)]
            step, stage = self._step(node, depths), self.stages[depth]
            if step is None:
                stage.nodes.append(node)
            else:
                stage.steps.append((node, step))
            for name in read:
                self._hand_over(name, makers, None if step else stage)
            makers.update((name, stage) for name in node.output if step is None)
            depths.update(dict.fromkeys(filter(None, node.output), depth + (step is not None)))
        for name in self.outputs:
            self._hand_over(name, makers, None)
        for name in last.keys() - set(self.outputs) - set(visible):
            self.stages[last[name]].unused.append(name)

    @staticmethod
    def _hand_over(name: str, makers: Mapping[str, _SessionStage], reader: _SessionStage | None) -> None:
        """Make a tensor an output of the session that computes it and an input of the one that reads it."""
        maker = makers.get(name)
        if maker is reader and maker is not None:
            return
        if maker is not None and name not in maker.outputs:
            maker.outputs.append(name)
        if reader is not None and name not in reader.inputs:
            reader.inputs.append(name)

    def _step(self, node: onnx.NodeProto, visible: Collection[str]) -> Step | None:
        """Return the function that computes a node in numpy; None if onnxruntime does."""
        if node.op_type == "If":
            bodies = {
                attribute.name: _Subgraph(self.owner, attribute.g, self.constants, visible)
                for attribute in node.attribute
            }
            return self._branch(node, bodies) if any(body.cut for body in bodies.values()) else None
        self.owner.unknown += self._unknown([node], self.constants)
        if node.op_type not in LAYOUTS or not self.owner.saturates(node, self.constants):
            return None
        self.owner.computed.append(original_name(node.name))
        attributes = attributes_of(node)
        return lambda tensors: [compute(node.op_type, attributes, [self._value(tensors, name) for name in node.input])]

    def _branch(self, node: onnx.NodeProto, bodies: Mapping[str, _Subgraph]) -> Step:
        """Return the function that runs the body which the condition of an If picks."""

        def step(tensors: Tensors) -> list[Any]:
            condition = bool(np.asarray(self._value(tensors, node.input[0])).item())
            return bodies["then_branch" if condition else "else_branch"].run(tensors)

        return step

    def _unknown(self, nodes: Iterable[onnx.NodeProto], constants: Constants) -> Iterator[str]:
        """Yield the names of the nodes whose sums can saturate and that cannot be computed, also in their bodies."""
        for node in nodes:
            if node.op_type in NOT_COMPUTED and self.owner.saturates(node, constants):
                yield original_name(node.name)
            for _, body in body_protos(node):
                inside = {**constants, **{tensor.name: tensor for tensor in body.initializer}}
                kernels = (kernel for kernel in _simplified(body.node) if self.owner.saturates(kernel, inside))
                yield from (original_name(kernel.name) for kernel in kernels if kernel.op_type in LAYOUTS)
                yield from self._unknown(body.node, inside)

    @property
    def cut(self) -> bool:
        """Whether a node is computed in numpy."""
        return any(stage.steps for stage in self.stages)

    def _value(self, tensors: Tensors, name: str) -> Any:
        """Return a tensor or a constant; None for an input that is left out."""
        return self.owner.value(self.constants[name]) if name and name not in tensors else tensors.get(name)

    def run(self, outer: Tensors) -> list[Any]:
        """Compute the outputs. `outer`: feeds, or the tensors of the enclosing graph."""
        defaults = {name: self.owner.value(default) for name, default in self.defaults.items() if name not in outer}
        tensors: ChainMap[str, Any] = ChainMap({}, defaults, dict(outer))
        for stage in self.stages:
            if stage.outputs:
                given = {name: tensors[name] for name in stage.inputs}
                if stage.session is None:
                    stage.session = self.owner.open_piece(stage.nodes, self.constants, given, stage.outputs)
                tensors.update(zip(stage.outputs, stage.session.run(stage.outputs, given), strict=True))
            for node, step in stage.steps:
                tensors.update(zip(node.output, step(tensors), strict=True))
            for name in stage.unused:
                tensors.maps[0].pop(name, None)
        return [self._value(tensors, name) for name in self.outputs]


def _simplified(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield nodes; a DynamicQuantizeMatMul as a DynamicQuantizeLinear and a product of its codes."""
    for node in nodes:
        if node.op_type != "DynamicQuantizeMatMul":
            yield node
            continue
        x, w, scale, zero, bias = [*node.input, "", ""][:5]
        codes, x_scale, x_zero = (f"{node.output[0]}/{part}" for part in ("codes", "scale", "zero"))
        yield helper.make_node("DynamicQuantizeLinear", [x], [codes, x_scale, x_zero], f"{node.name}/codes")
        inputs = [codes, w, x_scale, scale, x_zero, zero, bias]
        yield helper.make_node("MatMulIntegerToFloat", inputs, node.output, node.name, domain=node.domain)
