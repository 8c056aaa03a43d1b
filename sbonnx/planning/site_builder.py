"""Drafts of single sites: combines the recipe's settings and the backend's rules for one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import numpy as np

from sbonnx.backends import Backend, Numbers, Placement
from sbonnx.errors import RecipeError
from sbonnx.graph import Constant, Node, Tensor, query
from sbonnx.linear.layer import LinearLayer, channel_axes
from sbonnx.ops import EMBEDDING, LINEAR, MATRIX_PRODUCTS
from sbonnx.planning.drafts import Draft, Drafts
from sbonnx.planning.survey import Place, Survey, weighted
from sbonnx.planning.types import INTEGER_RECURRENT, STORED, ObserverChoice, Reader, RoundingChoice
from sbonnx.recipe import Recipe, TensorSettings
from sbonnx.recipe.names import NEAREST
from sbonnx.report.codes import Reason
from sbonnx.spec import BIAS_BITS, QuantSpec

WEIGHT_ONLY: Final = "weight_only"

NO_EXPERTS: Final = Reason(
    "no-integer-kernel", "weights of experts are quantized with MODE: weight_only for onnxruntime (QMoE) only"
)
"""Reason why a mixture of experts stays float."""

RECURRENT_WEIGHTS = (1, 2)
"""Inputs of LSTM, GRU and RNN that hold the weights of the input and of the state: (directions, gates, inputs)."""

STORED_BITS = 8
"""Width of weights that are stored in integers and computed with in float, and of recurrent ops in integers."""

SMALL_WEIGHT = 256
"""Number of values of a weight below which its codes, scales and the ops that decode them save little."""

SMALL_TABLE = 32
"""Tables with fewer rows, or shorter ones, stay float.

A row of a table with few rows is part of most samples, and its error is the same at every position: the two token types
of an ALBERT cost 5 dB in 8 bits, its words and positions together 0.6. With a scale for each, short rows save little.
"""

CHANNEL_AXIS = {"NCHW": 1, "NLC": 2}
"""Channel axis of per-channel activations, by A.OBSERVER.LAYOUT."""


def rounding_of(settings: TensorSettings) -> RoundingChoice:
    """Return the rounding method of a weight, from the recipe or by its bit width."""
    name = settings.rounding_name
    return RoundingChoice(name, {} if name == NEAREST else settings.rounding_options, settings.scale_name)


def weight_draft(place: Place, weight: Tensor, spec: QuantSpec, settings: TensorSettings, why: str, rule: str) -> Draft:
    """Draft a site on a weight of the node at `place`, in its scope, without readers.

    Raises:
        RecipeError: the recipe asks to optimize zero points for a type that has none.
    """
    if settings.scale_name == "hqq" and (spec.symmetric or spec.is_float):
        raise RecipeError(
            f"'W.ROUNDING.SCALE: hqq' chooses zero points, and the weight of '{place.node.name}' ({spec.label()}) has "
            "none: ask for an affine W.QSCHEME (--set w_qscheme=per-channel-affine), or leave W.ROUNDING.SCALE out and "
            "take W.OBSERVER.TYPE: mse"
        )
    return Draft(
        tensor=weight.name,
        role="weight",
        spec=spec,
        observer=ObserverChoice(settings.observer, settings.observer_arguments),
        scope=place.scope,
        why=why,
        rule=rule,
        rounding=rounding_of(settings),
    )


@dataclass(frozen=True)
class SiteBuilder:
    """Builder of sites: adds them to `drafts`, and records a refusal if one is not possible.

    Attributes:
        survey, recipe, backend: sources of the decisions.
        drafts: collects the sites.
        written: site key by tensor, for tensors that an integer kernel writes. All readers get the dequantized
            tensor, because the producer must write integers only; readers that the recipe keeps float are excepted.
        short_weights: 8-bit weights get types whose products do not saturate in 16 bits, see `safe_sums`.
    """

    survey: Survey
    recipe: Recipe
    backend: Backend
    drafts: Drafts
    written: dict[str, str] = field(default_factory=dict)
    short_weights: bool = False

    @property
    def rules(self) -> Placement:
        """Placement of the backend."""
        return self.backend.placement

    @property
    def numbers(self) -> Numbers:
        """Types and scales of the backend."""
        return self.backend.numbers

    def settings_of(self, side: Literal["w", "a"], node: Node, tensor: Tensor) -> TensorSettings | None:
        """Return the recipe's settings for one input, or None if it keeps that input float (recorded as a refusal)."""
        settings = self.recipe.settings(
            side,
            node=node.name,
            op=node.op,
            tensor=tensor.name,
            place=self.survey.place_of(node),
            embedding=node.op in EMBEDDING or node.name in self.survey.heads | self.survey.routers,
        )
        if not settings.enabled:
            what = "quantize weight" if side == "w" else "quantize input"
            self.drafts.refuse(what, node.name, Reason("recipe", f"the recipe says so ({settings.why})"))
            return None
        if side == "a" and tensor.name in self.survey.inputs and not self.recipe.quantizes_graph("inputs"):
            self.drafts.refuse(
                "quantize input", node.name, Reason("recipe", f"'{tensor.name}': the recipe says so (QUANTIZE_IO)")
            )
            return None
        return settings

    def activation(self, node: Node, index: int, why: str, rule: str) -> str | None:
        """Add a pair at input `index` of `node`. Return the site's key, or None if refused."""
        tensor = node.inputs[index]
        settings = self.settings_of("a", node, tensor)
        if settings is None:
            return None
        obstacle = self.survey.quantizable(tensor)
        if obstacle is not None:
            self.drafts.refuse("quantize input", node.name, Reason(obstacle.code, f"'{tensor.name}': {obstacle}"))
            return None
        if self.numbers.centred(node, index):
            settings = replace(settings, symmetric=True)
        spec = spec_of(self.backend, "a", settings, self._channels(node, tensor, settings))
        if tensor.name in self.written:
            key = self.written[tensor.name]  # all readers already have this pair
            if self.drafts.by_key[key].spec != spec:
                why = Reason(
                    "one-type-for-readers",
                    f"'{tensor.name}' is written as {self.drafts.by_key[key].spec.label()} for all its readers",
                )
                self.drafts.refuse(f"quantize input as {spec.label()}", node.name, why)
            return key
        key = self.open_site(tensor, spec, settings, why, rule)
        self.drafts.by_key[key].readers[Reader(node.name, index)] = None
        return key

    def _channels(self, node: Node, tensor: Tensor, settings: TensorSettings) -> int | None:
        """Return the channel axis of an activation, or None for one scale per tensor."""
        axis = CHANNEL_AXIS[settings.layout]
        if not settings.per_channel or (query.rank(tensor) or 0) <= axis:
            return None  # without such an axis the whole tensor has one scale
        if node.op in MATRIX_PRODUCTS:
            why = Reason(
                "one-scale-for-tensor", f"{node.op} sums over the channels of its input: one scale for the whole tensor"
            )
            self.drafts.refuse("quantize input per channel", node.name, why)
            return None
        return axis

    def open_site(self, tensor: Tensor, spec: QuantSpec, settings: TensorSettings, why: str, rule: str) -> str:
        """Add a pair on a tensor, without readers. Return the site's key."""
        draft = Draft(
            tensor=tensor.name,
            role="activation",
            spec=spec,
            observer=ObserverChoice(settings.observer, settings.observer_arguments),
            scope=self.survey.scope_of.get(tensor.name, ""),
            why=why,
            rule=rule,
        )
        return self.drafts.add(draft, None)

    def weight(self, place: Place, index: int, axis: int | None, why: str) -> str | None:
        """Add a site for the weight at input `index`. Return its key, or None if refused."""
        node = place.node
        tensor = node.inputs[index]
        settings = self.settings_of("w", node, tensor)
        if settings is None:
            return None
        spec = weight_spec(self.backend, node, index, axis, settings)
        if settings.per_channel and in_batches(node, index):
            why_one = Reason(
                "one-scale-for-tensor",
                f"'{tensor.name}' is a batch of matrices: integer kernels want one scale for the whole tensor",
            )
            self.drafts.refuse("quantize weight per channel", node.name, why_one)
        spec = self.safe_sums(node, index, spec)
        why_not = (
            Reason("weight-empty", f"'{tensor.name}' is empty") if 0 in tensor.shape else self.numbers.unfit(node, spec)
        )
        if why_not is not None:
            self.drafts.refuse("quantize weight", node.name, Reason.of(why_not, "by-backend"))
            return None
        return self.drafts.add(weight_draft(place, tensor, spec, settings, why, "weight"), Reader(node.name, index))

    def recurrent(self, place: Place) -> None:
        """Store the weights of a recurrent op in 8 bits, with one scale a row of the gates.

        It computes in integers if the backend has a kernel for it that is faster than float. Both directions share
        their scales. Narrower types are left out: the errors of all steps add up. So are the input weights of a layer
        that reads the model's input: a speaker embedding has 15.0 dB with those of its 40 mel bands in 8 bits, 28.7 dB
        without, and 0.8 dB if the bands are quantized as well.
        """
        node = place.node
        stored = [index for index in RECURRENT_WEIGHTS if self._is_storable(node, index)]
        why_float = self._why_float(node, stored)
        if why_float is not None:
            self.drafts.refuse("quantize", node.name, why_float)
        for index in stored:
            self._stored(place, index, 1, "recurrent" if why_float is not None else INTEGER_RECURRENT)

    def linear_storage(self, place: Place) -> None:
        """Store the weight of a linear op without an integer kernel in 8 bits, with one scale an output channel.

        Left out are small weights, those that other ops read as floats, and spectra and features, see
        `Survey.reads_features`.
        """
        node, at = place.node, weighted(place.node)
        if at is None or node.op not in self.rules.stored or at.weight != LINEAR[node.op].weight:
            return
        weight = node.inputs[at.weight]
        if query.dtype(weight) != np.dtype(np.float32) or np.prod(weight.shape) < SMALL_WEIGHT:
            return
        others = [use for use in query.readers(weight) if use[0].op not in LINEAR or use[1] != at.weight]
        if others or isinstance(node.inputs[at.data], Constant) or self.survey.reads_features(node):
            return
        if self._storage_settings(node, weight) is not None:
            self._stored(place, at.weight, at.axis, STORED)

    def _is_storable(self, node: Node, index: int) -> bool:
        """Return whether the weight at input `index` of a recurrent op can be stored in 8 bits."""
        tensor = node.inputs[index]
        if node.op not in self.rules.stored or not isinstance(tensor, Constant):
            return False
        if query.dtype(tensor) != np.dtype(np.float32) or 0 in tensor.shape:
            return False
        if index == RECURRENT_WEIGHTS[0] and self.survey.reads_model_input(node.inputs[0]):
            why = Reason(
                "first-layer-features",
                "it reads an input of the model, whose features may differ in scale: its input weights stay float",
            )
            self.drafts.refuse("quantize weight", node.name, why)
            return False
        return self._storage_settings(node, tensor) is not None

    def _why_float(self, node: Node, stored: Sequence[int]) -> Reason | None:
        """Return the reason why a recurrent op computes in float, or None if the backend has a kernel for it."""
        least = self.rules.recurrent.get(node.op)
        if least is None or self.recipe.mode == WEIGHT_ONLY or len(stored) < len(RECURRENT_WEIGHTS):
            return Reason("state-inside", f"{node.op}: its state is computed inside, out of reach of Q/DQ")
        if self.short_weights:
            return Reason("no-integer-kernel", f"{node.op}: its integer kernel saturates without 8-bit dot products")
        if int(node.attrs.get("hidden_size", 0)) < least or node.attrs.get("layout", 0):
            return Reason(
                "no-integer-kernel", f"{node.op}: its integer kernel is slower than float below a state of {least}"
            )
        settings = self.settings_of("a", node, node.inputs[0])
        if settings is None or settings.bits != STORED_BITS or settings.dtype != "int":
            return Reason("recipe", f"{node.op}: its integer kernel quantizes the input to 8 bits")
        return None

    def table(self, place: Place) -> None:
        """Store the table that a Gather reads rows of in 8 bits, with one scale a row; not if it is small."""
        table = place.node.inputs[0]
        if query.dtype(table) == np.dtype(np.float32) and min(table.shape) >= SMALL_TABLE:
            self._stored(place, 0, 0, "table")

    def _stored(self, place: Place, index: int, axis: int | None, rule: str) -> None:
        """Add a site for a weight that is stored in integers of 8 bits and computed with in float."""
        node, tensor = place.node, place.node.inputs[index]
        settings = self._storage_settings(node, tensor)
        if settings is None:
            return
        computed = "in integers" if rule == INTEGER_RECURRENT else "in float"
        draft = Draft(
            tensor=tensor.name,
            role="weight",
            spec=self.numbers.spec("w", STORED_BITS, True, axis if settings.per_channel else None),
            observer=ObserverChoice(),
            scope=self.survey.scope_of_readers(tensor),
            why=f"weight of {node.op}: stored in {STORED_BITS} bits, computed {computed}",
            rule=rule,
        )
        self.drafts.add(draft, Reader(node.name, index))

    def _storage_settings(self, node: Node, tensor: Tensor) -> TensorSettings | None:
        """Return the settings of a weight that can be stored in 8 bits, or None."""
        settings = self.settings_of("w", node, tensor)
        return None if settings is None or settings.bits > STORED_BITS or settings.dtype != "int" else settings

    def safe_sums(self, node: Node, index: int, spec: QuantSpec) -> QuantSpec:
        """Return the type of a weight whose sums of two products fit 16 bits, where they must; `spec` elsewhere.

        If the recipe asks for it (REDUCE_RANGE), it has 7 bits, else as many as the backend's kernels allow.
        """
        if not self.short_weights or spec != replace(spec, bits=8, signed=True, kind="int"):
            return spec
        return spec.short() if self.recipe.reduce_range else self.numbers.safe_sums(node, index, spec)

    def operand(self, place: Place, index: int, why: str) -> str | None:
        """Add a site for the float constant at input `index`, in the type of activations. Return None if refused."""
        node = place.node
        tensor = node.inputs[index]
        settings = self.settings_of("a", node, tensor)
        if settings is None:
            return None
        draft = Draft(
            tensor=tensor.name,
            role="weight",
            spec=spec_of(self.backend, "a", settings, None),
            observer=ObserverChoice(),
            scope=place.scope,
            why=why,
            rule="operand",
        )
        return self.drafts.add(draft, Reader(node.name, index))

    def bias(self, place: Place, node: Node, index: int, data: str, weight: str) -> None:
        """Add an int32 site for a constant bias, with the product of the scales of the sites `data` and `weight`."""
        tensor = node.inputs[index]
        if not isinstance(tensor, Constant) or len(tensor.shape) != 1:
            return
        axis = None if self.drafts.by_key[weight].spec.axis is None else 0
        draft = Draft(
            tensor=tensor.name,
            role="bias",
            spec=QuantSpec(bits=BIAS_BITS, axis=axis),
            observer=ObserverChoice(),
            scope=place.scope,
            why="bias: int32 with the scale of input times weight",
            rule="bias",
            follows=(data, weight),
        )
        self.drafts.add(draft, Reader(node.name, index))


def spec_of(backend: Backend, side: Literal["w", "a"], settings: TensorSettings, axis: int | None) -> QuantSpec:
    """Return the type that the recipe asks for, as the backend spells it."""
    return replace(backend.numbers.spec(side, settings.bits, settings.symmetric, axis), kind=settings.dtype)


def weight_spec(backend: Backend, node: Node, index: int, axis: int | None, settings: TensorSettings) -> QuantSpec:
    """Return the type of the weight at input `index`, block-wise if the recipe or the bit width requires it."""
    if node.op in backend.numbers.one_scale:
        axis = None
        settings = replace(settings, symmetric=settings.symmetric and not settings.by_width)
    if in_batches(node, index):
        axis = None
    spec = spec_of(backend, "w", settings, axis if settings.per_channel else None)
    spec = in_blocks(node, index, spec, settings.block_size, backend.numbers.block_sizes(spec))
    layer = LinearLayer.of_shape(node.op, node.attrs, tuple(node.inputs[index].shape), index)
    narrow = backend.numbers.narrow_depthwise and spec == QuantSpec(axis=spec.axis)
    return replace(spec, narrow=True) if narrow and not isinstance(layer, str) and layer.depthwise else spec


def in_batches(node: Node, index: int) -> bool:
    """Return whether the weight at input `index` is a batch of matrices."""
    return node.op == "MatMul" and len(node.inputs[index].shape) > 2


def block_for(length: int, wanted: int | None, taken: Sequence[int]) -> int | None:
    """Return the block size of an axis: the requested one, else the largest supported size that divides the axis.

    Args:
        length: size of the reduction axis.
        wanted: block size from the recipe, or None.
        taken: block sizes that the runtime supports; empty if it needs no blocks.

    Returns:
        The block size, or None if none was requested and the runtime needs no blocks. If no supported size divides
        `length`, the largest supported size.
    """
    if wanted is not None or not taken:
        return wanted
    return next((size for size in sorted(taken, reverse=True) if length % size == 0), max(taken))


def in_blocks(node: Node, index: int, spec: QuantSpec, wanted: int | None, taken: Sequence[int] = ()) -> QuantSpec:
    """Return `spec` with one scale per block along the reduction axis of the weight; `spec` unchanged if there is none.

    Args:
        wanted, taken: see `block_for`.
    """
    shape = node.inputs[index].shape
    _, axis = channel_axes(node.op, node.attrs, len(shape), index)
    if axis is None or node.op not in MATRIX_PRODUCTS:
        return spec
    size = block_for(shape[axis], wanted, taken)
    return spec if size is None else replace(spec, axis=axis, block_size=size)
