"""`merge`: fold adapters into their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from sbonnx.calib.data import dataset as datasets
from sbonnx.errors import ModelError
from sbonnx.qat.adapters.adapters import ADAPTERS
from sbonnx.qat.adapters.lora import LowRank, Outside, low_ranks
from sbonnx.qat.fakequant import FakeQuant
from sbonnx.qat.module import origin_of
from sbonnx.qat.onnx_to_torch.reimport import CALLED, parameter_name


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
    found = low_ranks(inner)
    if not found:
        raise ModelError("the module has no adapters to merge: make it with sbonnx.qat.prepare(..., adapters=8)")
    quantizers = {
        site.tensor: inner.get_submodule(name)
        for name, sites in origin.sites.items()
        for site in sites
        if site.role == "weight"
    }
    with torch.no_grad():
        folds = {
            name: _fold(one, inner.get_parameter(parameter_name(inner, name)), quantizers[name])
            for name, one in found.items()
        }
        feeds = None if data is None else datasets.read(data, origin.prepared.graph, split=split)
        changes = _changes(inner, folds, feeds)
        for name, fold in folds.items():
            inner.get_parameter(parameter_name(inner, name)).copy_(fold.weight)
    _take_out(inner)
    inner.requires_grad_(True)
    return tuple(Merged(name, changes[name]) for name in found)


@dataclass
class _Fold:
    """New weight of one merged adapter, and its error.

    Attributes:
        adapter: the merged adapter.
        weight: value of the parameter after the merge.
        wanted: effective weight of the layer before the merge.
        lost: error that the second rounding adds to `wanted`.
        sums: sums over the data of the squared changes and of the squared outputs.
    """

    adapter: LowRank
    weight: Tensor
    wanted: Tensor
    lost: Tensor
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0])


def _fold(adapter: LowRank, weight: Tensor, quantizer: nn.Module) -> _Fold:
    """Compute the new weight of one adapter, with the quantizer in eval mode."""
    assert isinstance(quantizer, FakeQuant)
    training = quantizer.training
    quantizer.eval()
    try:
        if not isinstance(adapter, Outside):
            summed = adapter(weight)
            return _Fold(adapter, summed, summed, torch.zeros_like(summed))
        wanted = quantizer(weight) + adapter.product(weight)
        latent = quantizer.latent_weight(wanted)
        return _Fold(adapter, latent, wanted, quantizer(latent) - wanted)
    finally:
        quantizer.train(training)


def _changes(module: fx.GraphModule, folds: Mapping[str, _Fold], data: datasets.Dataset | None) -> dict[str, float]:
    """Compute the relative change of each layer's output."""
    if data is None:
        return {name: _relative(_square(fold.lost), _square(fold.wanted)) for name, fold in folds.items()}
    outside = [fold for fold in folds.values() if isinstance(fold.adapter, Outside)]
    hooks = [fold.adapter.register_forward_pre_hook(_seen(fold)) for fold in outside]
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


def _seen(fold: _Fold) -> Callable[[nn.Module, tuple[Tensor, Tensor]], None]:
    """Return a hook that accumulates the squared change of a layer's output and its squared output."""

    def look(adapter: nn.Module, given: tuple[Tensor, Tensor]) -> None:
        assert isinstance(adapter, Outside)
        for place, weight in enumerate((fold.lost, fold.wanted)):
            fold.sums[place] += _square(adapter.layer(given[1], weight))

    return look


def _square(x: Tensor) -> float:
    return float(x.double().square().sum())


def _relative(changed: float, whole: float) -> float:
    """Compute the square root of the ratio; 0 if `whole` is 0."""
    return (changed / whole) ** 0.5 if whole > 0.0 else 0.0


def _take_out(module: fx.GraphModule) -> None:
    """Remove the adapters and their calls, in place."""
    for node in list(module.graph.nodes):
        if node.op == CALLED and isinstance(module.get_submodule(str(node.target)), LowRank):
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    module.delete_submodule(ADAPTERS)
    module.graph.lint()
    module.recompile()


__all__ = ["Merged", "merge"]
