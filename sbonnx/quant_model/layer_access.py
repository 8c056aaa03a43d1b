"""Access to the layers of a `QuantModel` and their quantizers: ``model.model.conv1.input_quantizer.set_bit(8)``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np

from sbonnx.calib.observers import make_observer
from sbonnx.calib.sketches import Sketch
from sbonnx.errors import LifeCycleError, RecipeError
from sbonnx.graph.query import node_by_name
from sbonnx.planning import Site
from sbonnx.recipe import Recipe, load
from sbonnx.recipe.names import full_backend
from sbonnx.recipe.node_patterns import matcher, pattern_of
from sbonnx.recipe.problem import most_similar
from sbonnx.recipe.resolve import changed, changes
from sbonnx.recipe.sections.base import overlay
from sbonnx.recipe.torch_modules import ModuleCall, candidates
from sbonnx.spec import Array, Bounds, QParams, params_from_bounds

if TYPE_CHECKING:
    from sbonnx.quant_model.pipeline_steps import PipelineSteps


from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Literal

from sbonnx.planning import Plan
from sbonnx.planning.types import Role

Side = Literal["input", "weight"]

SIDES: Final[tuple[Side, ...]] = ("input", "weight")
ROLES: Final[dict[Side, Role]] = {"input": "activation", "weight": "weight"}

Switch = tuple[Side, str]
"""(side, node name): the inputs or the weight of one node."""


def is_on(side: Side, node: str, quant: tuple[bool, bool], switches: Mapping[Switch, bool]) -> bool:
    """Return whether a quantizer is applied.

    Args:
        quant: (w_quant, a_quant) of `set_quant`.
        switches: overrides for single quantizers since then.
    """
    return switches.get((side, node), quant[0] if side == "weight" else quant[1])


def switched(plan: Plan, quant: tuple[bool, bool], switches: Mapping[Switch, bool]) -> tuple[Plan, bool, bool]:
    """Return the plan with only the switched-on readers, and whether any weight and any activation is quantized."""
    left: list[Site] = []
    for site in plan.sites:
        side: Side = "weight" if site.role == "weight" else "input"
        readers = tuple(
            reader for reader in site.readers if site.role == "bias" or is_on(side, reader.node, quant, switches)
        )
        if readers:
            left.append(replace(site, readers=readers))
    nodes = {site.key: {reader.node for reader in site.readers} for site in left}

    def product_on(site: Site) -> bool:
        data, weight = (nodes.get(key, set()) for key in site.follows or ())
        return bool(data & weight)

    sites = tuple(site for site in left if site.follows is None or product_on(site))
    roles = {site.role for site in sites}
    return replace(plan, sites=sites), "weight" in roles, "activation" in roles


@final
@dataclass(frozen=True)
class TensorQuantizer:
    """Quantizer of the inputs or of the weight of one layer.

    Attributes:
        model: the model of the layer.
        layer: the layer.
        side: "input" or "weight".
    """

    model: PipelineSteps
    layer: ModuleCall
    side: Side

    def sites(self) -> list[Site]:
        """Return the sites (planned Q/DQ pairs) that the layer reads on this side; empty if the side stays float."""
        role, nodes = ROLES[self.side], set(self.layer.nodes)
        plan = self.model.prepared.plan
        return [site for site in plan.of_role(role) if any(reader.node in nodes for reader in site.readers)]

    def set_bit(self, bit: int) -> None:
        """Set the bit width, 0 for float; see `QuantModel.set_bit`."""
        self.model._set_keys(self.layer, self.side, {"QUANTIZER": {"BIT": bit}})

    def set_symmetric(self, symmetric: bool) -> None:
        """Choose symmetric (zero point fixed at 0) or asymmetric quantization. Call it before `calc_qparams`.

        Raises:
            RecipeError: this side stays float, or the backend does not support it.
            LifeCycleError: there are scales already.
        """
        shape = "channel" if self._planned.spec.axis is not None else "tensor"
        self.model._set_keys(
            self.layer, self.side, {"QSCHEME": f"per-{shape}-{'symmetric' if symmetric else 'affine'}"}
        )

    def set_fake_fused(self) -> None:
        """Keep this side permanently in float, in the exported file too."""
        self.model._set_keys(self.layer, self.side, {"QUANTIZER": {"DISABLE": True}})

    def set_backend(self, backend: str) -> None:
        """Accept the backend of the model: all quantizers of a file have the same one.

        Raises:
            RecipeError: it is another one.
        """
        own = self.model.prepared.backend.name
        if full_backend(str(backend).lower()) != own:
            raise RecipeError(f"a file is for one backend, and this model is for {own}: QuantModel(..., backend='...')")

    def enable_export_onnx(self) -> None:
        """No-op: `QuantModel.export_onnx` writes Q/DQ pairs itself, whatever the state of the quantizers."""

    disable_export_onnx = enable_export_onnx

    def update_observer(self, x: Any) -> None:
        """Observe an array or tensor, for `calc_qparams` of this quantizer, beside the feeds of the model.

        Raises:
            RecipeError: this side stays float, or has a scale for each channel.
        """
        assert self._one_range.spec.axis is None
        array = np.asarray(x.detach().cpu().numpy() if hasattr(x, "detach") else x, np.float32)
        self.model._observed.setdefault((self.side, self.layer.name), Sketch()).observe(array)

    def calc_qparams(self) -> tuple[Array, Array]:
        """Set the range of what `update_observer` observed, by the observer of this quantizer.

        Returns:
            Scale and zero point.

        Raises:
            LifeCycleError: nothing was observed here, or the model has scales already.
            RecipeError: see `update_observer`.
        """
        sketch = self.model._observed.get((self.side, self.layer.name))
        if sketch is None:
            raise LifeCycleError(
                f"call {self.layer.name}.{self.side}_quantizer.update_observer(x) before calc_qparams()"
            )
        site = self._planned
        observer = make_observer(site.observer.name, site.observer.arguments)
        bounds = observer.bounds(sketch, site.spec, self.model.prepared.plan.scale_rule)
        return self.calc_qparams_with_minmax(bounds.lo, bounds.hi)

    def calc_qparams_with_minmax(self, min_val: Any, max_val: Any) -> tuple[Array, Array]:
        """Fix the range of this quantizer, before `QuantModel.calc_qparams` computes the others.

        Returns:
            Scale and zero point.

        Raises:
            LifeCycleError: there are scales already.
            RecipeError: this side stays float, or has a scale for each channel.
        """
        ends = (float(np.min(np.asarray(min_val))), float(np.max(np.asarray(max_val))))
        site, plan = self._one_range, self.model.prepared.plan
        self.model._set_ranges(self.layer, {planned.tensor: ends for planned in self.sites()})
        bounds = Bounds(*(np.asarray(end, np.float32) for end in ends))
        params = params_from_bounds(bounds, site.spec, rule=plan.scale_rule)
        return params.scale, params.zero_point

    def enable_quant(self) -> None:
        """Apply this quantizer in the simulated forward, overriding `set_quant`, until the next `set_quant`."""
        self.model._switch(self.layer, self.side, on=True)

    def disable_quant(self) -> None:
        """Skip this quantizer in the simulated forward until the next `set_quant`; exported files still have it."""
        self.model._switch(self.layer, self.side, on=False)

    @property
    def is_enable(self) -> bool:
        """Whether the simulated forward applies this quantizer."""
        on = any(is_on(self.side, node, self.model._quant, self.model._switches) for node in self.layer.nodes)
        return on and bool(self.sites())

    @property
    def fake_fused(self) -> bool:
        """Whether this side stays float."""
        return not self.sites()

    @property
    def bit(self) -> int:
        """Bit width, 0 if the side stays float."""
        sites = self.sites()
        return sites[0].spec.bits if sites else 0

    @property
    def _planned(self) -> Site:
        """The first site.

        Raises:
            RecipeError: the side stays float.
        """
        sites = self.sites()
        if not sites:
            raise RecipeError(f"the {self.side} of '{self.layer.name}' stays float: it has no scale")
        return sites[0]

    @property
    def _one_range(self) -> Site:
        """The first site, which has one scale.

        Raises:
            RecipeError: the side stays float, or has a scale for each channel.
        """
        site = self._planned
        if site.spec.axis is not None:
            raise RecipeError(
                f"the {self.side} of '{self.layer.name}' has a scale for each channel, which QuantModel.calc_qparams "
                "computes; one range needs QSCHEME: per-tensor-..."
            )
        return site

    @property
    def is_symmetric(self) -> bool:
        """Whether the zero point is fixed at 0."""
        return self._planned.spec.symmetric

    @property
    def is_perchannel(self) -> bool:
        """Whether each channel has its own scale."""
        return self._planned.spec.axis is not None

    @property
    def ch_axis(self) -> int | None:
        """Channel axis, or None for per-tensor quantization."""
        return self._planned.spec.axis

    @property
    def qparams(self) -> QParams:
        """Scale and zero point.

        Raises:
            LifeCycleError: `calc_qparams` was not called.
            RecipeError: the side stays float.
        """
        solution = self.model._solved(f"{self.layer.name}.{self.side}_quantizer.qparams")
        params = solution.qparams.get(self._planned.key)
        if params is None:
            raise RecipeError(f"the {self.side} of '{self.layer.name}' stays float: calibration found no range for it")
        return params

    @property
    def scale(self) -> Array:
        """Scale: scalar or per channel. Raises: as `qparams`."""
        return self.qparams.scale

    @property
    def zero_point(self) -> Array:
        """Zero point: scalar or per channel. Raises: as `qparams`."""
        return self.qparams.zero_point

    def __repr__(self) -> str:
        sites = self.sites()
        return f"{self.layer.name}.{self.side}_quantizer: {sites[0].spec.label() if sites else 'float'}"


@final
@dataclass(frozen=True)
class QuantLayer:
    """One layer of the file, with a quantizer for its inputs and one for its weight.

    Attributes:
        model: the model of the layer.
        layer: its nodes and names.
    """

    model: PipelineSteps
    layer: ModuleCall

    @property
    def input_quantizer(self) -> TensorQuantizer:
        """TensorQuantizer of the inputs."""
        return TensorQuantizer(self.model, self.layer, "input")

    @property
    def weight_quantizer(self) -> TensorQuantizer:
        """TensorQuantizer of the weight."""
        return TensorQuantizer(self.model, self.layer, "weight")

    def set_quant(self, w_quant: bool = False, a_quant: bool = False) -> None:
        """Switch both quantizers on or off in the simulated forward, until the next `QuantModel.set_quant`."""
        self.model._switch(self.layer, "weight", on=w_quant)
        self.model._switch(self.layer, "input", on=a_quant)

    def set_fake_fused(self) -> None:
        """Keep the layer permanently in float."""
        self.input_quantizer.set_fake_fused()
        self.weight_quantizer.set_fake_fused()

    def __repr__(self) -> str:
        return f"{self.input_quantizer}; {self.weight_quantizer}"


@final
class LayerAccess:
    """The layers of a model by attribute: ``layers.layer1_0_conv1``, or ``layers["layer1.0.conv1"]``."""

    def __init__(self, model: PipelineSteps) -> None:
        self._model = model

    def __getitem__(self, name: str) -> QuantLayer:
        return QuantLayer(self._model, find_layers(self._model, name, single=True)[0])

    def __getattr__(self, name: str) -> QuantLayer:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self[name]
        except RecipeError as error:
            raise AttributeError(str(error)) from None

    def named_modules(self) -> Iterator[tuple[str, QuantLayer]]:
        """Iterate over the layers that are planned to be quantized, as (name, layer), in graph order."""
        planned = {reader.node for site in self._model.prepared.plan.sites for reader in site.readers}
        layers = self._model.prepared.layers
        others = set(layers.names).difference(*(layer.nodes for layer in layers.layers))
        singles = (ModuleCall(node, "", (node,)) for node in layers.names if node in others)
        for layer in (*layers.layers, *singles):
            if planned.intersection(layer.nodes):
                yield layer.name, QuantLayer(self._model, layer)

    def __dir__(self) -> list[str]:
        return [name for name, _ in self.named_modules()]


def find_layers(model: PipelineSteps, name: str, *, single: bool = False) -> list[ModuleCall]:
    """Return the layers that match the name of an ONNX node, torch module or torch function; wildcards are allowed.

    Args:
        single: require exactly one match.

    Raises:
        RecipeError: no match (the message lists the nearest names), or several matches where one is required.
    """
    layers = model.prepared.layers
    covers = matcher(f"node:{name}")
    calls = [ModuleCall(node, "", (node,)) for node in layers.names if covers.hits_node(node, "")] or layers.find(name)
    if not calls:
        names = list(dict.fromkeys([*(layer.name for layer in layers.layers), *layers.names]))
        close = ", ".join(map(repr, most_similar(name, names, count=3)))
        raise RecipeError(f"the model has no layer '{name}'. Nearest: {close}")
    several = candidates(name, calls) or ([layer.path or layer.name for layer in calls] if single else [])
    if len(several) > 1:
        raise RecipeError(f"'{name}' is the name of {len(several)} layers: {', '.join(several[:8])}. Write one of them")
    return calls


def with_keys(model: PipelineSteps, nodes: Iterable[str], side: Side, keys: dict[str, Any]) -> Recipe:
    """Return the recipe of a model with `keys` set for one side of `nodes`, on top of their existing settings.

    Raises:
        RecipeError: the backend does not support it.
    """
    name, recipe = "W" if side == "weight" else "A", model._recipe
    named = model._prepared.recipe.nodes_of(name)
    ops = {change: node.op for change, node in node_by_name(model._prepared.graph).items()}
    half = recipe.w if side == "weight" else recipe.a
    entries = []
    for node in nodes:
        matching = (
            change for _, pattern, change in changes(half) if changed(pattern, node, ops.get(node, ""), "", named)
        )
        earlier = next((change.to_keys(given=True) for change in matching), {})
        entries.append({pattern_of(node, "node"): overlay(earlier, keys)})
    return load(recipe, overrides={f"{name}.SPECIFIC": [*entries, *recipe.to_dict()[name]["SPECIFIC"]]})


def with_ranges(recipe: Recipe, ranges: Mapping[str, tuple[float, float]]) -> Recipe:
    """Return the recipe with fixed ranges of tensors, before those that it has."""
    fixed = {pattern_of(tensor, "tensor"): list(ends) for tensor, ends in ranges.items()}
    others = {pattern: ends for pattern, ends in recipe.to_dict()["RANGES"].items() if pattern not in fixed}
    return load(recipe, overrides={"RANGES": {**fixed, **others}})
