"""One block in torch, with soft-rounded weights and fake-quantized activations, differentiable in both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from sbonnx.calib.engine.segments import Segment
from sbonnx.calib.quantized.state import QuantState
from sbonnx.calib.quantized.stream import quantized
from sbonnx.errors import ModelError
from sbonnx.graph import Constant, Graph, Node, Tensor, Variable
from sbonnx.graph.edit import replace_input
from sbonnx.graph.query import dtype, producer
from sbonnx.plan.types import Reader, Site
from sbonnx.spec import Array, Bounds, QParams
from sbonnx.torchnet import TorchNet, torch_module

BESIDE: Final = "/float"
"""Suffix of the name of a block input for its values in the float network."""

READ: Final = "FakeQuant"
"""Op of inserted nodes that fake-quantize a tensor, or mix both streams at a block input."""


@dataclass
class BlockRead:
    """Fake quantization of one activation, optionally with a learned scale.

    Attributes:
        qparams: scale and zero point; None: not quantized.
        part: logarithm of the factor of the scale, a tensor that requires a gradient if the scale is learned.
    """

    qparams: QParams | None
    part: Any = None

    def fake_quant(self, torch: Any, x: Any) -> Any:
        """Quantize and dequantize `x`, with a straight-through gradient that is 0 for clipped values.

        Source: Esser et al. 2020 (LSQ), equations 1 to 3: with the straight-through rounding, autograd yields the
        gradient of the scale.
        """
        if self.qparams is None:
            return x
        spec, whole = self.qparams.spec, self.qparams.scale.size == 1
        if whole and self.part is None and not spec.is_fp8:
            scale, zero = float(self.qparams.scale), int(self.qparams.zero_point)
            return torch.fake_quantize_per_tensor_affine(x, scale, zero, spec.qmin, spec.qmax)
        scale = self._beside(torch, self.qparams.scale, x)
        ratio = x / (scale if self.part is None else scale * self.part.exp())
        if spec.is_fp8:
            clipped = torch.clamp(ratio, spec.qmin, spec.qmax)
            rounded = clipped.to(torch.float8_e4m3fn).to(x.dtype)
        else:
            zero = int(self.qparams.zero_point) if whole else self._beside(torch, self.qparams.zero_point, x)
            clipped = torch.clamp(ratio, spec.qmin - zero, spec.qmax - zero)
            rounded = clipped.round()
        passed = clipped + (rounded - clipped).detach()
        return passed * (scale if self.part is None else scale * self.part.exp())

    def _beside(self, torch: Any, numbers: Array, x: Any) -> Any:
        """Reshape scales or zero points so that they broadcast with `x`."""
        if self.qparams is None:
            raise ValueError("there are no numbers to read with")
        wide = self.qparams.along(numbers.astype(np.float32), tuple(x.shape))
        return torch.from_numpy(np.array(wide)).to(x.device)

    def bounds(self) -> Bounds | None:
        """Return the range at the learned scale; None if the scale was not learned."""
        if self.qparams is None or self.part is None:
            return None
        limits, factor = self.qparams.limits, np.exp(self.part.detach().cpu().numpy().astype(np.float64))
        return Bounds((limits.lo * factor).astype(np.float32), (limits.hi * factor).astype(np.float32))


class SoftBlock:
    """A piece of the graph that is evaluated with given values for its weights.

    Args:
        graph, numbers, uses: the graph, quantization parameters, and sites by reader.
        segment: the piece.
        weights: sites of the weights that are given at each evaluation; others use their codes.
        biases: names of constants that are given at each evaluation, by reader.
        device: torch device name.

    Raises:
        ModelError: torch cannot evaluate the piece; the message names the node.
    """

    def __init__(
        self,
        graph: Graph,
        numbers: QuantState,
        uses: Mapping[Reader, Site],
        segment: Segment,
        weights: Mapping[str, Site],
        biases: Mapping[Reader, str],
        device: str,
    ) -> None:
        self.torch = torch_module(" (rounding by moments does not need it)")
        self.device = device
        self.drop = 0.0
        self.generator = self.torch.Generator(device=device)
        self.reads: dict[str, BlockRead] = {}
        self._masks: dict[str, Any] = {}
        self._hooks: dict[str, Callable[..., Any]] = {}
        others = {
            reader: site for reader, site in uses.items() if site.role != "activation" and site.key not in weights
        }
        piece = quantized(segment, graph, numbers, {r: s for r, s in others.items() if s.role != "bias"})
        self._give(piece, uses, weights, biases)
        self._read(piece, {r: s for r, s in uses.items() if s.role == "activation"}, numbers, set(segment.inputs))
        self.net = TorchNet(piece, device=device, hooks=self._hooks)

    def __call__(self, feeds: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
        """Evaluate the block and return its outputs.

        Args:
            feeds: its inputs in the quantized network, and those of the float one under their names + `BESIDE`.
            values: values of weights (by site key) and biases (by name of the constant).
        """
        self._masks.clear()
        return self.net({**feeds, **{given(name): value for name, value in values.items()}})

    def _give(
        self,
        piece: Graph,
        uses: Mapping[Reader, Site],
        weights: Mapping[str, Site],
        biases: Mapping[Reader, str],
    ) -> None:
        """Turn learned weights and biases into inputs of `piece`, in place."""
        made: dict[str, Variable] = {}
        for node in piece.nodes:
            for index, tensor in enumerate(list(node.inputs)):
                reader = Reader(node.name, index)
                site = uses.get(reader)
                name = site.key if site is not None and site.key in weights else biases.get(reader)
                if name is None:
                    continue
                if dtype(tensor) != np.float32:
                    raise ModelError(f"'{tensor.name}' is {dtype(tensor)}; blocks are learned in float32")
                if name not in made:
                    made[name] = Variable(given(name), tensor.dtype, tensor.shape)
                replace_input(node, index, made[name])
        piece.inputs.extend(made.values())

    def _read(self, piece: Graph, uses: Mapping[Reader, Site], numbers: QuantState, entering: set[str]) -> None:
        """Insert hooks in `piece` for fake-quantized activations, in place."""
        made: dict[tuple[str, str | None], Tensor] = {}
        front: list[Node] = []
        behind: dict[int, list[Node]] = {}
        for node in list(piece.nodes):
            for index, tensor in enumerate(list(node.inputs)):
                site = uses.get(Reader(node.name, index))
                is_float = dtype(tensor) == np.float32 and not isinstance(tensor, Constant)
                if not is_float or (site is None and tensor.name not in entering):
                    continue
                key = (tensor.name, None if site is None else site.key)
                if key not in made:
                    step = self._node(piece, tensor, site, numbers, tensor.name in entering)
                    maker = producer(tensor)
                    (front if maker is None else behind.setdefault(id(maker), [])).append(step)
                    made[key] = step.outputs[0]
                replace_input(node, index, made[key])
        piece.nodes[:] = [*front, *(each for node in piece.nodes for each in (node, *behind.get(id(node), ())))]

    def _node(self, piece: Graph, tensor: Tensor, site: Site | None, numbers: QuantState, entering: bool) -> Node:
        """Create a node that reads `tensor` as given by the site, and register its hook."""
        label = f"{tensor.name}/read as it is" if site is None else f"{site.key}/read"
        read = BlockRead(None if site is None else numbers.params(site))
        if site is not None:
            self.reads[site.key] = read
        inputs = [tensor]
        if entering:
            beside = next((each for each in piece.inputs if each.name == tensor.name + BESIDE), None)
            if beside is None:
                beside = Variable(tensor.name + BESIDE, tensor.dtype, tensor.shape)
                piece.inputs.append(beside)
            inputs.append(beside)

        def hook(x: Any, plain: Any = None) -> Any:
            return self._mixed(tensor.name, x, read.fake_quant(self.torch, x), plain)

        self._hooks[label] = hook
        return Node(READ, label, {}, inputs, [Variable(f"{label}/out", tensor.dtype, tensor.shape)])

    def _mixed(self, name: str, x: Any, read: Any, plain: Any | None) -> Any:
        """Randomly replace elements of `read` by unquantized values, of the float network if known (QDrop)."""
        other = x if plain is None else plain
        if self.drop <= 0 or other is read:
            return read
        if name not in self._masks:
            bytes_ = self.torch.empty(x.shape, dtype=self.torch.uint8, device=x.device)
            self._masks[name] = (bytes_.random_(generator=self.generator) < round(256 * self.drop)).to(x.dtype)
        return self.torch.lerp(read, other, self._masks[name])


def given(name: str) -> str:
    """Return the name of the input of the piece for a weight or bias."""
    return f"{name}/given"
