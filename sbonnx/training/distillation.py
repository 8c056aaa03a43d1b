"""Distillation losses: distance of outputs and intermediate tensors from those of the float network, without labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from sbonnx.errors import DataError, ModelError, RecipeError
from sbonnx.graph import Constant, Graph
from sbonnx.graph import Tensor as GraphTensor
from sbonnx.graph.query import constant, dtype, ordered, output_names, producer, readers, shape, tensors_by_name
from sbonnx.ops import ENDS_BLOCKS, LINEAR
from sbonnx.spec import Array
from sbonnx.torchnet.onnx_to_torch.operators import NodeModule

Outputs = Mapping[str, Tensor]
Loss = Callable[[Outputs, Outputs], Tensor]
"""(outputs of the trained network, outputs of the float network on the same feed), by name → scalar loss."""


def distillation(outputs: Outputs, targets: Outputs) -> Tensor:
    """Compute the mean over float outputs of the relative squared error; see `relative_error`.

    Class scores (logits) are treated the same way. With few samples on which the float network is confident, the
    divergence of the probabilities contains little information on most classes, and matching the logits learns more
    (Kim et al. 2021, "Comparing Kullback-Leibler divergence and mean squared error loss in knowledge distillation").

    Raises:
        DataError: there is no float output to compare.
    """
    return torch.stack([relative_error(*pair) for pair in _compared(outputs, targets)]).mean()


def with_divergence(outputs: Outputs, targets: Outputs) -> Tensor:
    """Compute the distillation loss with the Kullback-Leibler divergence for class scores, (N, C) with C > 1.

    The loss of such an output is the divergence of its softmax from that of the target (Hinton et al. 2015, equation 2
    at temperature 1) plus half its relative squared error. Without the latter, a constant shift of the scores, which
    softmax ignores, could drift. The loss of any other output is that of `distillation`.

    Raises:
        DataError: there is no float output to compare.
    """
    terms = []
    for output, target in _compared(outputs, targets):
        error = relative_error(output, target)
        if target.dim() == 2 and target.shape[1] > 1:
            error = 0.5 * error + divergence(output, target)
        terms.append(error)
    return torch.stack(terms).mean()


def _compared(outputs: Outputs, targets: Outputs) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of float outputs and their targets, in float32."""
    pairs = [(outputs[name].float(), target.float()) for name, target in targets.items() if target.is_floating_point()]
    if not pairs:
        raise DataError("the model has no float output to distill from: pass a custom loss to train()")
    return pairs


def relative_error(output: Tensor, target: Tensor) -> Tensor:
    """Compute the squared error over the squared deviation of the target from its mean (1 for the mean as output)."""
    spread = (target - target.mean()).square().sum()
    return (output - target).square().sum() / spread.clamp_min(torch.finfo(torch.float32).tiny)


def divergence(output: Tensor, target: Tensor) -> Tensor:
    """Compute the Kullback-Leibler divergence of softmax(output) from softmax(target), (N, C), mean over N, in nats."""
    return torch.nn.functional.kl_div(
        torch.log_softmax(output, dim=1), torch.log_softmax(target, dim=1), reduction="batchmean", log_target=True
    )


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
            raise RecipeError(f"inner: '{wanted}' is not supported: use 'blocks', or a list of tensor names")
        return _blocks(graph)
    tensors = tensors_by_name(graph)
    for name in wanted:
        tensor = tensors.get(name)
        maker = None if tensor is None else producer(tensor)
        kind = None if tensor is None else dtype(tensor)
        if maker is None or (kind is not None and kind.kind != "f"):
            what = "is not a tensor of the graph" if tensor is None else "is not computed in floating point"
            raise RecipeError(f"inner: '{name}' {what}: use outputs of nodes, such as convolutions")
    place = {id(node): number for number, node in enumerate(ordered(graph.nodes))}
    return tuple(sorted(dict.fromkeys(wanted), key=lambda name: place[id(producer(tensors[name]))]))


Kept = Mapping[str, Sequence[tuple[int, Array]]]
"""Remaining entries of tensors that lost channels, by name: pairs of an axis and int64 indices along it."""


def shared_tensors(names: Sequence[str], graph: Graph, teacher: Graph, kept: Kept | None = None) -> tuple[str, ...]:
    """Return those tensors of the teacher that another graph computes too.

    Args:
        names: tensors of the teacher; see `inner_tensors`.
        graph: the graph to train, such as the teacher after pruning.
        teacher: graph to learn from.
        kept: tensors of which the graph has a part. Others must have the same known shape in both graphs.
    """
    ours, theirs = tensors_by_name(graph), tensors_by_name(teacher)
    return tuple(
        name
        for name in names
        if name in ours
        and producer(ours[name]) is not None
        and (name in (kept or {}) or (shape(theirs[name]) is not None and shape(ours[name]) == shape(theirs[name])))
    )


def require_same_interface(graph: Graph, teacher: Graph) -> None:
    """Check that two graphs have inputs and outputs of the same names, in the same order.

    Raises:
        ModelError: they have not.
    """
    for what, ours, theirs in (("inputs", graph.inputs, teacher.inputs), ("outputs", graph.outputs, teacher.outputs)):
        names, wanted = ([tensor.name for tensor in tensors] for tensors in (ours, theirs))
        if names != wanted:
            raise ModelError(
                f"the teacher has the {what} {', '.join(wanted)}, and the model to train has {', '.join(names)}: use "
                "the model that it was made from as teacher"
            )


def _blocks(graph: Graph) -> tuple[str, ...]:
    outputs, nodes = output_names(graph), ordered(graph.nodes)
    sums = [  # of two computed inputs, i.e. no constant and no graph input
        node.outputs[0]
        for node in nodes
        if node.op == "Add" and all(not isinstance(x, Constant) and producer(x) is not None for x in node.inputs)
    ]
    blocks = [name for name in dict.fromkeys(_end(tensor).name for tensor in sums) if name not in outputs]
    if blocks:
        return tuple(blocks)
    layers = [
        node.outputs[0]
        for node in nodes
        if node.op in LINEAR and any(constant(tensor) is not None for tensor in node.inputs[1:2])
    ]
    inside = [name for name in dict.fromkeys(_end(tensor).name for tensor in layers) if name not in outputs]
    count = min(LAYERS, len(inside))
    return tuple(inside[(at + 1) * len(inside) // count - 1] for at in range(count))


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
            if isinstance(part, NodeModule) and part.call.name in self._wanted:
                self._hooks.append(part.register_forward_hook(partial(self._store, self._wanted[part.call.name])))
        return self

    def __exit__(self, *_: object) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def __call__(self, **batch: Tensor) -> dict[str, Tensor]:
        """Run the network and return its outputs and the intermediate tensors by name."""
        self._seen.clear()
        outputs = self._module(**batch)
        values = {**self._seen, **outputs}
        self._seen.clear()
        return values

    def _store(self, wanted: Sequence[tuple[str, int]], _: nn.Module, __: object, result: Any) -> None:
        for name, place in wanted:
            self._seen[name] = result[place] if isinstance(result, tuple) else result


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
