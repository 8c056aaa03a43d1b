"""`merge`: adapters become part of the weights that they belong to."""

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
    """One adapter that was merged.

    Attributes:
        weight: its name in the graph.
        changed: by how much the merge changed what the layer gives, as the root of the squared change over the squared
            output without its bias; 0 for an adapter inside the rounding. Without data it is that of inputs of which
            each has the same variance, which is that of the weights.
    """

    weight: str
    changed: float


def merge(module: nn.Module, data: Any = None, *, split: int | None = None) -> tuple[Merged, ...]:
    """In place. Fold each adapter into its weight; the module is as one without adapters then, all of it trainable.

    Inside the rounding nothing changes: the weight becomes the sum that was rounded, and its codes stay, bit for bit.
    Outside, the weight becomes its dequantized codes with the product, and is rounded again, at the scale that it
    has: what of the product is smaller than half a code is lost, and `Merged.changed` says how much that was.

    Args:
        module: of `prepare` with adapters; what wraps it is looked through.
        data, split: what the changes are measured on; see `sbonnx.quantize`.

    Raises:
        ModelError: the module has no adapters, or is none of `sbonnx.qat`'s.
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
    """What a merge makes of a weight.

    Attributes:
        weight: the new parameter.
        wanted: what the layer multiplied with before, all in all.
        lost: what is added to that by rounding again.
        sums: of the squared changes and the squared outputs on data.
    """

    adapter: LowRank
    weight: Tensor
    wanted: Tensor
    lost: Tensor
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0])


def _fold(adapter: LowRank, weight: Tensor, quantizer: nn.Module) -> _Fold:
    """The new weight of one adapter, as the quantizer will have it in eval mode."""
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
    """The relative change of what each layer gives."""
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
    """Adds up, for each input of a layer, what the change makes of it and what the layer made of it."""

    def look(adapter: nn.Module, given: tuple[Tensor, Tensor]) -> None:
        assert isinstance(adapter, Outside)
        for place, weight in enumerate((fold.lost, fold.wanted)):
            fold.sums[place] += _square(adapter.layer(given[1], weight))

    return look


def _square(x: Tensor) -> float:
    return float(x.double().square().sum())


def _relative(changed: float, whole: float) -> float:
    """The root of a share; 0 of nothing."""
    return (changed / whole) ** 0.5 if whole > 0.0 else 0.0


def _take_out(module: fx.GraphModule) -> None:
    """In place. The calls of adapters, and the adapters themselves."""
    for node in list(module.graph.nodes):
        if node.op == CALLED and isinstance(module.get_submodule(str(node.target)), LowRank):
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    module.delete_submodule(ADAPTERS)
    module.graph.lint()
    module.recompile()


__all__ = ["Merged", "merge"]
