"""One pair at a time: what the recipe and the backend say of a tensor, and the site that comes of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from sbonnx.backends import Backend
from sbonnx.errors import RecipeError
from sbonnx.graph import Constant, Node, Tensor, query
from sbonnx.ops import MATRIX_PRODUCTS
from sbonnx.plan.blocks import spec_of, weight_spec
from sbonnx.plan.survey import Place, Survey
from sbonnx.plan.types import ObserverChoice, Reader, RoundingChoice
from sbonnx.plan.wishes import Draft, Wishes
from sbonnx.recipe import Recipe, Settings
from sbonnx.recipe.resolve import NEAREST
from sbonnx.spec import BIAS_BITS, QuantSpec

CHANNEL_AXIS = {"NCHW": 1, "NLC": 2}
"""Where per-channel activations have their channels, by A.OBSERVER.LAYOUT."""


def rounding_of(settings: Settings) -> RoundingChoice:
    """How a weight becomes codes, as the recipe says or by its width."""
    name = settings.rounding_name
    return RoundingChoice(name, {} if name == NEAREST else settings.rounding_arguments, settings.scale_name)


def weight_draft(place: Place, index: int, spec: QuantSpec, settings: Settings, why: str, rule: str) -> Draft:
    """A site on the weight at input `index` of the node at `place`, before anybody reads it.

    Raises:
        RecipeError: the recipe wants zero points chosen that there are not.
    """
    if settings.scale_name == "hqq" and (spec.symmetric or spec.is_fp8):
        raise RecipeError(
            f"'W.ROUNDING.SCALE: hqq' chooses zero points, and the weight of '{place.node.name}' ({spec.label()}) has "
            "none: ask for an affine W.QSCHEME (--set w_qscheme=per-channel-affine), or leave W.ROUNDING.SCALE out and "
            "take W.OBSERVER.TYPE: mse"
        )
    return Draft(
        tensor=place.node.inputs[index].name,
        role="weight",
        spec=spec,
        observer=ObserverChoice(settings.observer, settings.observer_arguments),
        scope=place.scope,
        why=why,
        rule=rule,
        rounding=rounding_of(settings),
    )


@dataclass(frozen=True)
class Sites:
    """Asks for pairs, and records why there is none.

    Attributes:
        survey, recipe, backend: what is asked of.
        wishes: where sites gather.
        written: key of the site by tensor, for what an integer kernel writes: all its readers get the dequantized
            tensor, because the producer must write integers only; but those that the recipe leaves float.
        short_weights: weights of 8 bits get 7.
    """

    survey: Survey
    recipe: Recipe
    backend: Backend
    wishes: Wishes
    written: dict[str, str] = field(default_factory=dict)
    short_weights: bool = False

    def settings_of(self, side: Literal["w", "a"], node: Node, tensor: Tensor) -> Settings | None:
        """What the recipe wants at one input, or None when it wants float there (recorded)."""
        settings = self.recipe.settings(
            side, node=node.name, op=node.op, tensor=tensor.name, place=self.survey.place_of(node)
        )
        if not settings.enabled:
            what = "quantize weight" if side == "w" else "quantize input"
            self.wishes.refuse(what, node.name, f"the recipe says so ({settings.why})")
            return None
        return settings

    def activation(self, node: Node, index: int, why: str, rule: str) -> str | None:
        """Ask for a pair at input `index` of `node`. Returns the site's key, or None when refused."""
        tensor = node.inputs[index]
        settings = self.settings_of("a", node, tensor)
        if settings is None:
            return None
        obstacle = self.survey.quantizable(tensor)
        if obstacle is not None:
            self.wishes.refuse("quantize input", node.name, f"'{tensor.name}': {obstacle}")
            return None
        spec = spec_of(self.backend, "a", settings, self._channels(node, tensor, settings))
        if tensor.name in self.written:
            key = self.written[tensor.name]  # every reader has the pair already
            if self.wishes.drafts[key].spec != spec:
                why = f"'{tensor.name}' is written as {self.wishes.drafts[key].spec.label()} for all its readers"
                self.wishes.refuse(f"quantize input as {spec.label()}", node.name, why)
            return key
        key = self.open_site(tensor, spec, settings, why, rule)
        self.wishes.drafts[key].readers[Reader(node.name, index)] = None
        return key

    def _channels(self, node: Node, tensor: Tensor, settings: Settings) -> int | None:
        """The channel axis of an activation, or None for one scale."""
        axis = CHANNEL_AXIS[settings.layout]
        if not settings.per_channel or (query.rank(tensor) or 0) <= axis:
            return None  # where there is no such axis the whole tensor has one scale
        if node.op in MATRIX_PRODUCTS:
            why = f"{node.op} sums over the channels of its input: one scale for the whole tensor"
            self.wishes.refuse("quantize input per channel", node.name, why)
            return None
        return axis

    def open_site(self, tensor: Tensor, spec: QuantSpec, settings: Settings, why: str, rule: str) -> str:
        """Ask for a pair on a tensor, for nobody yet. Returns the site's key."""
        wish = Draft(
            tensor=tensor.name,
            role="activation",
            spec=spec,
            observer=ObserverChoice(settings.observer, settings.observer_arguments),
            scope=self.survey.scope_of.get(tensor.name, ""),
            why=why,
            rule=rule,
        )
        return self.wishes.add(wish, None)

    def weight(self, place: Place, index: int, axis: int | None, why: str) -> str | None:
        """Ask for codes of the weight at input `index`. Returns the site's key, or None when refused."""
        node = place.node
        tensor = node.inputs[index]
        settings = self.settings_of("w", node, tensor)
        if settings is None:
            return None
        spec = weight_spec(self.backend, node, index, axis, settings)
        if self.short_weights and spec == replace(spec, bits=8, signed=True, kind="int"):
            spec = replace(spec, bits=7)
        why_not = f"'{tensor.name}' is empty" if 0 in tensor.shape else self.backend.unfit(node, spec)
        if why_not is not None:
            self.wishes.refuse("quantize weight", node.name, why_not)
            return None
        return self.wishes.add(weight_draft(place, index, spec, settings, why, "weight"), Reader(node.name, index))

    def bias(self, place: Place, node: Node, index: int, data: str, weight: str) -> None:
        """Ask for int32 codes of a constant bias, with the scales of the sites `data` and `weight`."""
        tensor = node.inputs[index]
        if not isinstance(tensor, Constant) or len(tensor.shape) != 1:
            return
        axis = None if self.wishes.drafts[weight].spec.axis is None else 0
        wish = Draft(
            tensor=tensor.name,
            role="bias",
            spec=QuantSpec(bits=BIAS_BITS, axis=axis),
            observer=ObserverChoice(),
            scope=place.scope,
            why="bias: int32 with the scale of input times weight",
            rule="bias",
            follows=(data, weight),
        )
        self.wishes.add(wish, Reader(node.name, index))
