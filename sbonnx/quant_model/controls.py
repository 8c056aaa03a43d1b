"""Bit widths and quantizer switches of single layers, by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from sbonnx.errors import LifeCycleError
from sbonnx.quant_model.layer_access import SIDES, LayerAccess, QuantLayer, Side, find_layers
from sbonnx.quant_model.pipeline_steps import PipelineSteps
from sbonnx.recipe import load

Sides = Literal["input", "weight", "both"]


class LayerControls(PipelineSteps):
    """Per-layer settings after construction; base class of `sbonnx.quant_model.QuantModel`."""

    @property
    def model(self) -> LayerAccess:
        """Layers by name, each with its quantizers: ``model.model.conv1.input_quantizer.set_bit(8)``."""
        return LayerAccess(self)

    def named_modules(self) -> Iterator[tuple[str, QuantLayer]]:
        """Iterate over the layers that are planned to be quantized, as (name, layer)."""
        return self.model.named_modules()

    def set_bit(self, name: str, bit: int, side: Sides = "both") -> None:
        """Set the bit width of layers. Call it before `calc_qparams`; recorded feeds are observed again.

        Args:
            name: a node, torch module or function, wildcards allowed: see docs/recipe.md.
            bit: bit width, 0 for float.
            side: "input", "weight" or "both".

        Raises:
            RecipeError: unknown layer, or the backend does not support this width.
            LifeCycleError: there are scales already.
        """
        for layer in find_layers(self, name):
            for half in _sides(side):
                self._set_keys(layer, half, {"QUANTIZER": {"BIT": bit}})

    def enable_quant(self, name: str, side: Sides = "both") -> None:
        """Apply the quantizers of layers in the simulated forward, until the next `set_quant`. Args: see `set_bit`."""
        for layer in find_layers(self, name):
            for half in _sides(side):
                self._switch(layer, half, on=True)

    def disable_quant(self, name: str, side: Sides = "both") -> None:
        """Skip the quantizers of layers in the simulated forward, until the next `set_quant`; exported files still
        have them. Args: see `set_bit`.
        """
        for layer in find_layers(self, name):
            for half in _sides(side):
                self._switch(layer, half, on=False)

    def set_lastmodule_wbit(self, bit: int = 8) -> None:
        """Set the bit width of the last linear layer's weight: LAST_BITS.W of the recipe."""
        if self.solution is not None:
            raise LifeCycleError("call set_lastmodule_wbit() before calc_qparams(): there are scales already")
        self._change_recipe(load(self._recipe, overrides={"LAST_BITS.W": bit}))


def _sides(side: Sides) -> tuple[Side, ...]:
    return SIDES if side == "both" else (side,)
