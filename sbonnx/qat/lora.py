"""Modules of low-rank adapters (LoRA): a product of two low-rank matrices, added to a frozen weight; `merge`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from sbonnx.calib.data import dataset as datasets
from sbonnx.errors import ModelError
from sbonnx.ops import CONVOLUTIONS
from sbonnx.qat.fakequant import FakeQuant
from sbonnx.qat.module import origin_of
from sbonnx.torchnet import FUNCTIONS, Call, compute
from sbonnx.torchnet.onnx_to_torch.reimport import CALL_MODULE, parameter_name
from sbonnx.training.fixed_zeros import masked
from sbonnx.training.loop import LEAST_SIZE

ADAPTERS: Final = "adapters"
"""Name of the submodule that holds the adapters."""

UNIT: Final = 1.0 / LEAST_SIZE
"""Factor of the product. `B` is initialized to 0, and the training loop scales the learning rate of such a parameter
by `LEAST_SIZE`; multiplying the product by this factor makes up for it."""


class LowRank(nn.Module):  # type: ignore[misc]
    """Low-rank update D of a weight.

        D = alpha / rank * m_o / LEAST_SIZE * (B A),   A (rank, I) normal of variance 1 / rank, B (O, rank) 0

    in the layout of the weight. O is the size of its output axis, I the product of all other sizes, and m_o the mean
    magnitude of the weights of output o. `A` and `B` therefore have the same magnitude in all layers, and the learning
    rate of the loop has the same meaning for `B` as for weights: the change of the layer's output in one step, times
    ``alpha / rank``. Without a rank, D is trained as a whole: the product is only `B`, (O, I), times `alpha`.

    Args:
        weight: weight with two or more axes.
        initializer: its name in the graph.
        axis: its output axis.
        rank, alpha: rank and scaling of the product; rank None: no limit.
        chance: random generator for `A`.

    Attributes:
        initializer, axis: as given.
        A, B: parameters; A is None without a rank.
        unit: (O, 1), factors of the rows of the product.

    Source: Hu et al. 2022, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1.
    """

    unit: Tensor

    def __init__(
        self, weight: Tensor, initializer: str, *, axis: int, rank: int | None, alpha: float, chance: torch.Generator
    ) -> None:
        super().__init__()
        self.initializer = initializer
        self.axis = axis
        matrix = self.matrix(weight.detach())
        outputs, inputs = matrix.shape
        if rank is None:
            self.register_parameter("A", None)
        else:
            factor = torch.randn(rank, inputs, generator=chance, dtype=torch.float32) * rank**-0.5
            self.A = nn.Parameter(factor.to(weight.device, weight.dtype))
        self.B = nn.Parameter(weight.detach().new_zeros(outputs, inputs if rank is None else rank))
        self.register_buffer("unit", matrix.abs().mean(dim=1, keepdim=True) * (alpha / (rank or 1) * UNIT))

    def matrix(self, weight: Tensor) -> Tensor:
        """Return a weight as a matrix (O, I)."""
        return weight.movedim(self.axis, 0).flatten(1)

    def product(self, like: Tensor) -> Tensor:
        """Return D in the layout and shape of `like`."""
        moved = like.movedim(self.axis, 0).shape
        scaled = self.unit * self.B
        return (scaled if self.A is None else scaled @ self.A).reshape(moved).movedim(0, self.axis)

    def extra_repr(self) -> str:
        return f"'{self.initializer}', rank {None if self.A is None else self.A.shape[0]}"


@final
class Inside(LowRank):
    """Adapter that is added to the weight before rounding: the layer reads the quantized sum.

        W_q = s * clip(round((W_0 + D) / s))

    Source: Bondarenko et al. 2024, "Low-Rank Quantization-Aware Training for LLMs", section 3, with the product in
    units of the weight instead of quantized values.
    """

    def forward(self, weight: Tensor) -> Tensor:
        """Return the weight plus the product, with the weight's shape and type."""
        return weight + self.product(weight)


@final
class Outside(LowRank):
    """Adapter as a parallel branch: its output is added to the layer's output, and the quantized weight stays frozen.

        y = x W_q + x D

    The two low-rank matrices are applied one after the other. In a convolution, `A` has the kernel and `B` is
    pointwise.

    Args:
        weight, initializer, options: see `LowRank`.
        call: the layer, a MatMul, a Gemm or a Conv with one group.

    Attributes:
        kernel: shape of one filter of a convolution, (I, ...).

    Source: Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs", equation 5.
    """

    def __init__(self, weight: Tensor, initializer: str, *, call: Call, **options: Any) -> None:
        super().__init__(weight, initializer, **options)
        self.call = call
        self.kernel = tuple(weight.movedim(self.axis, 0).shape[1:])

    def forward(self, given: Tensor, x: Tensor) -> Tensor:
        """Add the branch to the layer's output.

        Args:
            given: output of the layer.
            x: input of the layer.

        Returns:
            shape and type of `given`.
        """
        wide = self.unit * self.B
        if self.call.op in CONVOLUTIONS:
            thin = compute(FUNCTIONS[self.call.op], self.call, (x, self.A.reshape(-1, *self.kernel), None))
            return given + functional.linear(thin.movedim(1, -1), wide).movedim(-1, 1)
        if self.call.op == "Gemm":
            rows = x.transpose(0, 1) if self.call.number("transA", 0) else x
            side = functional.linear(functional.linear(rows, self.A), wide)
            return given + self.call.number("alpha", 1.0) * side
        return given + functional.linear(functional.linear(x, self.A), wide)

    def layer(self, x: Tensor, weight: Tensor) -> Tensor:
        """Compute the layer's output with another weight and without bias."""
        reads = (x, weight) if self.call.op == "MatMul" else (x, weight, None)
        output: Tensor = compute(FUNCTIONS[self.call.op], self.call, reads)
        return output


def low_ranks(module: nn.Module) -> dict[str, LowRank]:
    """Return the adapters of a module by initializer, in the order of the layers."""
    inner = getattr(module, "module", module)
    return {part.initializer: part for part in inner.modules() if isinstance(part, LowRank)}


def weight_as_read(module: nn.Module, initializer: str, weight: Tensor) -> Tensor:
    """Return the input of a weight's fake-quant module: with the product of an `Inside` adapter, and zeros kept."""
    inner = getattr(module, "module", module)
    adapter = low_ranks(inner).get(initializer)
    read: Tensor = adapter(weight) if isinstance(adapter, Inside) else weight
    return masked(inner, parameter_name(inner, initializer), read)


@dataclass(frozen=True)
class Merged:
    """Result of merging one adapter.

    Attributes:
        weight: name of its weight in the graph.
        changed: relative change of the layer's output by the merge, as the root of the squared change over the squared
            output without bias; 0 for an adapter inside the rounding. Without data, uncorrelated inputs of equal
            variance are assumed; it is then the relative change of the weight.
    """

    weight: str
    changed: float


def merge(module: nn.Module, data: Any = None, *, split: int | None = None) -> tuple[Merged, ...]:
    """Fold each adapter into its weight, in place.

    Afterwards the module has no adapters, and all its parameters are trainable.

    An adapter inside the rounding changes nothing: the weight becomes the sum that was rounded, and its quantized
    values stay the same, bit for bit. With an adapter outside, the weight becomes its dequantized values plus the
    product and is rounded again at the same scale. Parts of the product below half a quantization step are lost;
    `Merged.changed` reports how much that was.

    Args:
        module: result of `prepare` with adapters, wrapped or not.
        data, split: samples on which the changes are measured; see `sbonnx.quantize`.

    Raises:
        ModelError: the module has no adapters, or was not made by `sbonnx.qat`.
        DataError: the data do not fit the model.
    """
    origin, inner = origin_of(module), getattr(module, "module", module)
    adapters = low_ranks(inner)
    if not adapters:
        raise ModelError("the module has no adapters to merge: make it with sbonnx.qat.prepare(..., adapters=8)")
    quantizers = {
        site.tensor: inner.get_submodule(name)
        for name, sites in origin.sites.items()
        for site in sites
        if site.role == "weight"
    }
    with torch.no_grad():
        folds = {
            name: _fold(adapter, inner.get_parameter(parameter_name(inner, name)), quantizers[name], inner)
            for name, adapter in adapters.items()
        }
        feeds = None if data is None else datasets.read(data, origin.prepared.graph, split=split)
        changes = _changes(inner, folds, feeds)
        for name, fold in folds.items():
            inner.get_parameter(parameter_name(inner, name)).copy_(fold.weight)
    for node in list(inner.graph.nodes):
        if node.op == CALL_MODULE and isinstance(inner.get_submodule(str(node.target)), LowRank):
            node.replace_all_uses_with(node.args[0])
            inner.graph.erase_node(node)
    inner.delete_submodule(ADAPTERS)
    inner.graph.lint()
    inner.recompile()
    inner.requires_grad_(True)
    return tuple(Merged(name, changes[name]) for name in adapters)


@dataclass
class _MergedWeight:
    """New weight of one merged adapter, the layer's effective weight before, and the error of the second rounding.

    `sums`: sums over the data of the squared changes and of the squared outputs.
    """

    adapter: LowRank
    weight: Tensor
    wanted: Tensor
    lost: Tensor
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0])


def _fold(adapter: LowRank, weight: Tensor, quantizer: nn.Module, module: fx.GraphModule) -> _MergedWeight:
    assert isinstance(quantizer, FakeQuant)
    training = quantizer.training
    quantizer.eval()
    try:
        if not isinstance(adapter, Outside):
            summed = weight_as_read(module, adapter.initializer, weight)
            return _MergedWeight(adapter, summed, summed, torch.zeros_like(summed))
        wanted = quantizer(weight) + adapter.product(weight)
        latent = masked(module, parameter_name(module, adapter.initializer), quantizer.latent_weight(wanted))
        return _MergedWeight(adapter, latent, wanted, quantizer(latent) - wanted)
    finally:
        quantizer.train(training)


def _changes(
    module: fx.GraphModule, folds: Mapping[str, _MergedWeight], data: datasets.Dataset | None
) -> dict[str, float]:
    """Compute the relative change of each layer's output."""
    if data is None:
        return {name: _relative(_square(fold.lost), _square(fold.wanted)) for name, fold in folds.items()}
    outside = [fold for fold in folds.values() if isinstance(fold.adapter, Outside)]
    hooks = [fold.adapter.register_forward_pre_hook(partial(_accumulate, fold)) for fold in outside]
    inputs, training = origin_of(module).inputs, module.training
    device = next(iter(module.parameters())).device
    module.eval()
    try:
        for feed in data if outside else ():
            module(
                **{inputs.get(name, name): torch.from_numpy(np.array(value)).to(device) for name, value in feed.items()}
            )
    finally:
        for hook in hooks:
            hook.remove()
        module.train(training)
    return {name: _relative(*fold.sums) for name, fold in folds.items()}


def _accumulate(fold: _MergedWeight, adapter: nn.Module, given: tuple[Tensor, Tensor]) -> None:
    """Hook that accumulates the squared change of a layer's output and its squared output."""
    assert isinstance(adapter, Outside)
    for place, weight in enumerate((fold.lost, fold.wanted)):
        fold.sums[place] += _square(adapter.layer(given[1], weight))


def _square(x: Tensor) -> float:
    return float(x.double().square().sum())


def _relative(changed: float, whole: float) -> float:
    return (changed / whole) ** 0.5 if whole > 0.0 else 0.0
