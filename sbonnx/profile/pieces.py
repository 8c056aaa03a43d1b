"""`Piece`: one step in an onnxruntime session that runs in float and with any quantized replacements."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, final

from sbonnx.calib.engine.runner import LayerRunner
from sbonnx.graph import Constant, Graph, Tensor, Variable
from sbonnx.graph.extract import extract
from sbonnx.graph.query import constant
from sbonnx.plan.types import Reader
from sbonnx.profile.numbers import Numbers
from sbonnx.profile.steps import Step
from sbonnx.spec import Array, QParams

Known = dict[tuple[str, int], Array]
"""Fake-quantized activations, by name and id of their parameters, which live as long."""


@dataclass(frozen=True)
class _Slot:
    """An input that may be quantized: it becomes a separate input of the session."""

    reader: Reader
    tensor: Tensor
    name: str


@final
class Piece:
    """The nodes of a step in one session, where every quantizable input, including weights, is a session input.

    A single session thus computes the step in float, with only its weights or activations quantized, and at any width.
    Optimization is off and each run has one thread, as in `sbonnx.calib.quantized.forward.Forward`.

    Args:
        graph: the float graph; not changed.
        step: the nodes to run.
        reads: every use that may be replaced.
        replaced: names of constants that may be replaced for all readers.
        index: `tensors_by_name(graph)`.

    Attributes:
        step: as given.
        slots: the inputs that may be quantized.
        op, attributes, data: for a layer: its type, its attributes and the name of its first input.
    """

    def __init__(
        self,
        graph: Graph,
        step: Step,
        *,
        reads: Collection[Reader],
        replaced: Collection[str],
        index: Mapping[str, Tensor],
        device: str = "cpu",
    ) -> None:
        self.step = step
        self._fills: dict[int, dict[str, Array]] = {}
        self._floats: dict[str, Array] = {}
        self._lock = threading.Lock()
        piece = extract(graph, step.inputs, step.outputs, scope=step.scope, index=index)
        self.data = piece.nodes[0].inputs[0].name if step.layer and piece.nodes[0].inputs else ""
        self.slots = tuple(_open_slots(piece, frozenset(reads), frozenset(replaced)))
        self.op = piece.nodes[0].op if step.layer else ""
        self.attributes: Mapping[str, Any] = piece.nodes[0].attrs if step.layer else {}
        self._run = LayerRunner(
            piece, device=device, threads=1, optimisation="off", name=f"'{step.layer or 'between layers'}'"
        )

    def constants(self) -> dict[int, Array]:
        """Return a layer's constants that may be quantized, by the index of the input."""
        slots = ((slot.reader.index, constant(slot.tensor)) for slot in self.slots)
        return {index: value for index, value in slots if value is not None}

    def run(
        self, values: Mapping[str, Array], numbers: Numbers | None = None, *, known: Known | None = None
    ) -> dict[str, Array]:
        """Run the step and return its outputs by name.

        Args:
            values: its inputs by name, as computed.
            numbers: the replacements; None: float. The same object must return the same values every time.
            known: cache of fake-quantized activations, updated here; for several runs on the same values.
        """
        feeds = dict(values)
        fixed = self._constants(numbers)
        made: Known = {} if known is None else known
        for slot in self.slots:
            if slot.name in fixed:
                feeds[slot.name] = fixed[slot.name]
                continue
            x = values[slot.tensor.name]
            qparams = None if numbers is None else numbers.params(slot.reader)
            key = (slot.tensor.name, id(qparams))
            if key not in made:
                made[key] = x if qparams is None else _fake_quant(qparams, x)
            feeds[slot.name] = made[key]
        return self._run.run(feeds, self.step.outputs)

    def _constants(self, numbers: Numbers | None) -> dict[str, Array]:
        """Return the values of constant slots under `numbers`, computed once under a lock."""
        with self._lock:
            return self._made(numbers)

    def _made(self, numbers: Numbers | None) -> dict[str, Array]:
        if not self._floats:
            found = ((slot.name, constant(slot.tensor)) for slot in self.slots)
            self._floats = {name: value for name, value in found if value is not None}
        if numbers is None:
            return self._floats
        if id(numbers) not in self._fills:
            fills = dict(self._floats)
            for slot in self.slots:
                if isinstance(slot.tensor, Constant):
                    meaning = numbers.constant(slot.reader, slot.tensor)
                    fills[slot.name] = fills[slot.name] if meaning is None else meaning
            self._fills[id(numbers)] = fills
        return self._fills[id(numbers)]

    def close(self) -> None:
        """Free the session. A second call is a no-op."""
        self._run.close()
        self._fills.clear()

    def __enter__(self) -> Piece:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open_slots(piece: Graph, reads: frozenset[Reader], replaced: frozenset[str]) -> list[_Slot]:
    """Turn each quantizable input into a separate graph input. In place."""
    slots = []
    for node in piece.nodes:
        for index, tensor in enumerate(list(node.inputs)):
            reader = Reader(node.name, index)
            if reader in reads or (isinstance(tensor, Constant) and tensor.name in replaced):
                opened = Variable(f"{tensor.name}/read by {node.name}/{index}", tensor.dtype, tensor.shape)
                slots.append(_Slot(reader, tensor, opened.name))
                node.inputs[index] = opened
                piece.inputs.append(opened)
    kept = {id(tensor) for tensor in piece.outputs}
    piece.inputs = [tensor for tensor in piece.inputs if tensor.outputs or id(tensor) in kept]
    return slots


def _fake_quant(qparams: QParams, x: Array) -> Array:
    """Fake-quantize `x`, keeping its type."""
    return qparams.fake_quant(x).astype(x.dtype)
