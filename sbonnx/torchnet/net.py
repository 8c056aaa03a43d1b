"""`TorchNet`: a differentiable evaluator of a graph or subgraph, by torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from sbonnx.errors import ModelError
from sbonnx.graph import Constant, Graph, Node
from sbonnx.graph.query import attribute, bodies, constant
from sbonnx.spec import Array
from sbonnx.torchnet.call import Call, Function, Tensor, Unfit, compute, torch_module
from sbonnx.torchnet.ops import function_of

Hook = Callable[..., Any]
"""Replacement for the function of a node: (each input) → output."""


def lacking(nodes: Iterable[Node]) -> str | None:
    """Return the reason why torch cannot evaluate these nodes, with the first unsupported node; None if it can.

    Unsupported attributes are detected only when a node is computed.
    """
    for node in nodes:
        if bodies(node) or function_of(node.op, node.domain) is None:
            return f"op {node.op} of node '{node.name}' is not supported in torch"
    return None


def as_tensor(torch: Any, values: Array, device: str) -> Tensor:
    """Copy a numpy array to a tensor.

    Integer tensors of up to 1024 elements stay on the CPU, because most of them are shapes whose values are read.

    Raises:
        Unfit: torch does not have the type.
    """
    name = values.dtype.name
    if name in PACKED:
        values = values.astype(PACKED[name])
    try:
        if name in OF_TORCH:  # in numpy these are types of ml_dtypes, which torch does not accept
            plain = np.array(values, order="C").view(np.dtype(f"int{8 * values.dtype.itemsize}"))
            tensor = torch.from_numpy(plain).view(getattr(torch, name))
        else:
            tensor = torch.from_numpy(np.array(values, order="C"))
    except TypeError as error:
        raise Unfit(f"torch has no type {values.dtype}") from error
    return tensor.to(device) if tensor.dtype.is_floating_point or tensor.numel() > 1024 else tensor


PACKED: Final = {"int4": "int8", "uint4": "uint8", "int2": "int8", "uint2": "uint8"}
"""Integer types that torch does not have, and the smallest type that it can compute with instead."""

OF_TORCH: Final = frozenset({"bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"})


@dataclass(frozen=True)
class _Step:
    """One node, prepared for evaluation: its function or hook, names of inputs and outputs ("" if omitted).

    `last`: tensors that can be freed after this step: not read by a later node, and not outputs of the net.
    """

    call: Call
    function: Function
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    last: tuple[str, ...]


def _ignoring_call(hook: Hook) -> Function:
    return lambda call, *inputs: hook(*inputs)


class TorchNet:
    """Evaluates `graph` on tensors. Tensors are freed after their last reader, unless autograd needs them.

        net = TorchNet(piece, device="cpu")
        y = net({"x": x})["y"]

    Args:
        graph: graph with its nodes in topological order; constants are copied to the device once.
        device: torch device: "cpu", "cuda:0".
        hooks: functions by node name that replace the computation of these nodes.

    Raises:
        ModelError: an op or a type is not supported; the message names it.
        DeviceError: torch is not installed.
    """

    def __init__(self, graph: Graph, *, device: str = "cpu", hooks: Mapping[str, Hook] | None = None) -> None:
        self.torch = torch_module()
        self.device = device
        self.hooks = dict(hooks or {})
        self.outputs = tuple(tensor.name for tensor in graph.outputs)
        missing = lacking(node for node in graph.nodes if node.name not in self.hooks)
        if missing is not None:
            raise ModelError(missing)
        self._constants: dict[str, Tensor] = {}
        self._steps = self._prepare(graph)

    def __call__(self, feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Evaluate the graph and return its outputs by name.

        Raises:
            ModelError: a node is not supported, or fails on its inputs; the message names it.
        """
        values = {**self._constants, **feeds}
        for step in self._steps:
            result = compute(step.function, step.call, [values[name] if name else None for name in step.inputs])
            values.update(zip(step.outputs, result if isinstance(result, tuple) else (result,), strict=False))
            for name in step.last:
                values.pop(name, None)
        return {name: values[name] for name in self.outputs}

    def _prepare(self, graph: Graph) -> list[_Step]:
        last: dict[str, int] = {}
        for number, node in enumerate(graph.nodes):
            last.update((tensor.name, number) for tensor in [*node.inputs, *node.outputs] if tensor.name)
        for name in self.outputs:
            last.pop(name, None)
        ending: dict[int, list[str]] = {}
        for name, number in last.items():
            ending.setdefault(number, []).append(name)
        steps = []
        for number, node in enumerate(graph.nodes):
            for tensor in node.inputs:
                if isinstance(tensor, Constant) and tensor.name not in self._constants:
                    try:
                        self._constants[tensor.name] = as_tensor(self.torch, np.asarray(constant(tensor)), self.device)
                    except Unfit as error:
                        where = f"'{tensor.name}', which node '{node.name}' ({node.op}) reads"
                        raise ModelError(f"{where}: {error}") from error
            outputs = tuple(tensor.name for tensor in node.outputs)
            attributes = {name: attribute(node, name) for name in node.attrs}
            used = sum(1 for name in outputs if name)
            call = Call(self.torch, node.name, node.op, attributes, graph.opset, used, node.domain or "")
            hook = self.hooks.get(node.name)
            function = function_of(node.op, node.domain) if hook is None else _ignoring_call(hook)
            assert function is not None  # `lacking`
            inputs = tuple(tensor.name for tensor in node.inputs)
            steps.append(_Step(call, function, inputs, outputs, tuple(ending.get(number, ()))))
        return steps
