"""Feature distillation: intermediate tensors that training compares with those of the float network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from sbonnx.errors import RecipeError
from sbonnx.graph import Constant, Graph, Node
from sbonnx.graph import Tensor as GraphTensor
from sbonnx.graph.query import constant, dtype, ordered, output_names, producer, readers, tensors_by_name
from sbonnx.ops import ENDS_BLOCKS, LINEAR
from sbonnx.qat.onnx_to_torch.operators import Op
from sbonnx.qat.training.losses import Loss, Outputs, relative_error

BLOCKS: Final = "blocks"
"""Keyword for the automatic selection of tensors."""

LAYERS: Final = 8
"""Maximum number of layers whose outputs are compared if a network has no residual blocks."""


def inner_tensors(graph: Graph, wanted: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names of the tensors to compare, in the order in which they are computed.

    Args:
        graph: the float graph.
        wanted: names of tensors, or "blocks": the outputs of residual blocks, after the activation if it is the only
            reader of the sum. In a network without residual blocks: the outputs of up to 8 layers with weights, evenly
            distributed.

    Raises:
        RecipeError: a name is not a tensor that the graph computes in floating point.
    """
    if isinstance(wanted, str):
        if wanted != BLOCKS:
            raise RecipeError(f"inner: '{wanted}' is no choice of tensors: write 'blocks', or a list of their names")
        return _blocks(graph)
    tensors = tensors_by_name(graph)
    for name in wanted:
        found = tensors.get(name)
        maker = None if found is None else producer(found)
        kind = None if found is None else dtype(found)
        if maker is None or (kind is not None and kind.kind != "f"):
            what = "is no tensor of the graph" if found is None else "is not computed in floating point"
            raise RecipeError(f"inner: '{name}' {what}: name outputs of nodes, such as those of its convolutions")
    place = {id(node): number for number, node in enumerate(ordered(graph.nodes))}
    return tuple(sorted(dict.fromkeys(wanted), key=lambda name: place[id(producer(tensors[name]))]))


def _blocks(graph: Graph) -> tuple[str, ...]:
    """Select the tensors of "blocks"; see `inner_tensors`."""
    outputs, nodes = output_names(graph), ordered(graph.nodes)
    sums = [node for node in nodes if node.op == "Add" and _joins(node)]
    ends = dict.fromkeys(_end(node.outputs[0]).name for node in sums)
    found = [name for name in ends if name not in outputs]
    if found:
        return tuple(found)
    layers = [
        node.outputs[0].name
        for node in nodes
        if node.op in LINEAR and any(constant(tensor) is not None for tensor in node.inputs[1:2])
    ]
    inside = [_end(tensors_by_name(graph)[name]).name for name in layers]
    inside = [name for name in dict.fromkeys(inside) if name not in outputs]
    count = min(LAYERS, len(inside))
    return tuple(inside[(at + 1) * len(inside) // count - 1] for at in range(count))


def _joins(node: Node) -> bool:
    """Return whether an Add has two computed inputs, i.e. no constant and no graph input."""
    return all(not isinstance(tensor, Constant) and producer(tensor) is not None for tensor in node.inputs)


def _end(tensor: GraphTensor) -> GraphTensor:
    """Return the output of the activation that is the only reader of this tensor, else the tensor itself."""
    reading = readers(tensor)
    if len(reading) == 1 and reading[0][0].op in ENDS_BLOCKS and reading[0][1] == 0:
        return reading[0][0].outputs[0]
    return tensor


@final
class Taps:
    """Network that also returns intermediate tensors, by their names in the graph; a context manager.

        with Taps(module, graph, ["layer3.out"]) as tapped:
            tapped(input=images)["layer3.out"]

    Args:
        module: result of `reimport` of the graph, with or without fake-quant modules, or a wrapper with the attribute
            ``module``. The tensors are taken before fake quantization.
        graph: graph that the module was made from.
        names: tensors of the graph, see `inner_tensors`.
    """

    def __init__(self, module: nn.Module, graph: Graph, names: Sequence[str]) -> None:
        self._module, self._seen = module, dict[str, Tensor]()
        tensors = tensors_by_name(graph)
        self._wanted: dict[str, list[tuple[str, int]]] = {}
        for name in names:
            maker = producer(tensors[name])
            assert maker is not None
            place = next(at for at, output in enumerate(maker.outputs) if output.name == name)
            self._wanted.setdefault(maker.name, []).append((name, place))
        self._hooks: list[Any] = []

    def __enter__(self) -> Taps:
        inner = getattr(self._module, "module", self._module)
        for part in inner.modules():
            if isinstance(part, Op) and part.call.name in self._wanted:
                self._hooks.append(part.register_forward_hook(self._kept(self._wanted[part.call.name])))
        return self

    def __exit__(self, *_: object) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def __call__(self, **batch: Tensor) -> dict[str, Tensor]:
        """Run the network and return its outputs and the intermediate tensors by name."""
        self._seen.clear()
        outputs = self._module(**batch)
        found = {**self._seen, **outputs}
        self._seen.clear()
        return found

    def _kept(self, wanted: Sequence[tuple[str, int]]) -> Callable[..., None]:
        """Return a hook that stores the outputs of a node."""

        def keep(_module: nn.Module, _inputs: object, made: Tensor | tuple[Tensor, ...]) -> None:
            for name, place in wanted:
                self._seen[name] = made[place] if isinstance(made, tuple) else made

        return keep


def with_inner(loss: Loss, names: Sequence[str], weight: float) -> Loss:
    """Return a loss that adds `weight` times the mean relative squared error of the inner tensors to `loss`.

    Args:
        loss: loss of the outputs, called without the inner tensors.
        names: inner tensors in the results of both networks.
        weight: weight of the inner tensors' error.

    Source: Romero et al. 2015, "FitNets", equation 3, relative to the size of each tensor.
    """
    inner = frozenset(names)

    def both(outputs: Outputs, targets: Outputs) -> Tensor:
        value = loss(_without(outputs, inner), _without(targets, inner))
        errors = [relative_error(outputs[name].float(), targets[name].float()) for name in names]
        return value + weight * torch.stack(errors).mean()

    return both


def _without(values: Mapping[str, Tensor], names: frozenset[str]) -> dict[str, Tensor]:
    return {name: value for name, value in values.items() if name not in names}
