"""TensorSettings of one tensor, resolved from the recipe."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

from sbonnx.recipe.defaults import DEFAULT, EFFORTS, WidthDefaults, Widths, by_width, is_symmetric, with_rounding
from sbonnx.recipe.names import FLOAT, NEAREST, is_per_channel
from sbonnx.recipe.node_patterns import matcher
from sbonnx.recipe.problem import Path, Wrong, key_path, one_of, suggestion
from sbonnx.recipe.sections.base import Section, keys_of, overlay
from sbonnx.recipe.sections.quantizers import (
    AUTO,
    ActivationChange,
    ActivationObserver,
    Activations,
    Change,
    ScaleName,
    ScaleSetting,
    Side,
    WeightChange,
    WeightObserver,
    Weights,
)
from sbonnx.recipe.value_types import MAX_BITS
from sbonnx.schemes import BY_WIDTH
from sbonnx.small_floats import FLOATS, Kind

Observer = WeightObserver | ActivationObserver


OTHER_NAMES: Final = {"entropy": "kl_histogram", "kl": "kl_histogram", "histogram": "mse", "max": "minmax"}
"""Observers by their names in other tools."""


@dataclass(frozen=True)
class TensorSettings:
    """Quantization settings of one side (weight or activation) of one tensor, as set by the user.

    Attributes:
        enabled: False leaves it float.
        bits: bit width; 0 only if `enabled` is False.
        symmetric, per_channel: the scheme.
        quantizer: canonical name of the quantizer type.
        observer: canonical name of the observer.
        observer_arguments: keyword arguments for that observer.
        why: the key that decided, as written in error messages; "W" or "A" for the values of the whole side.
        quantizer_arguments: keyword arguments for that quantizer.
        layout: "NCHW" or "NLC", the channel axis of per-channel activations.
        dtype: "int", or a kind of small floats.
        block_size: number of values along the summed axis that share a scale, or None.
        rounding: name of the rounding of a weight, or "auto".
        rounding_arguments: keyword arguments for it, or for the one that "auto" may choose.
        rounding_scale: method that determines the scales of a weight, or "auto".
        by_width: `symmetric` was derived from the bit width.
        narrowest: least width of the recipe's whole sides.
        widths: defaults by width.
        op: operator type of the node; "": not known.
    """

    enabled: bool
    bits: int
    symmetric: bool
    per_channel: bool
    quantizer: str
    observer: str
    observer_arguments: Mapping[str, float | str]
    why: str
    quantizer_arguments: Mapping[str, float | str] = field(default_factory=dict)
    layout: str = "NCHW"
    dtype: Kind = "int"
    block_size: int | None = None
    rounding: str = AUTO
    rounding_arguments: Mapping[str, float | str | bool] = field(default_factory=dict)
    rounding_scale: ScaleSetting = AUTO
    by_width: bool = False
    narrowest: int = MAX_BITS
    widths: Widths = EFFORTS[DEFAULT]
    op: str = ""

    def of_bits(self, bits: int, why: str) -> TensorSettings:
        """Return the settings at another bit width, 0 for float, because of the key `why`."""
        symmetric = is_symmetric(BY_WIDTH, bits, self.quantizer) if self.by_width else self.symmetric
        return replace(self, bits=bits, enabled=bits != FLOAT, why=why, dtype="int", symmetric=symmetric)

    @property
    def rounds_by_inputs(self) -> bool:
        """Whether weight rounding uses the input activations of the layer: by name, or by width with "auto"."""
        return self.scale_name == "search" or self.rounding_name != NEAREST

    @property
    def rounding_name(self) -> str:
        """Rounding method of a weight, with "auto" resolved."""
        if self.rounding != AUTO:
            return self.rounding
        row = self._row
        blind = self.rounding_scale == "hqq" or not (row.ops is None or not self.op or self.op in row.ops)
        return NEAREST if blind else row.rounding

    @property
    def rounding_options(self) -> Mapping[str, float | str | bool]:
        """Arguments of the rounding: those that were set, else those by width."""
        search = self._row.search if self.rounding_name == "gptq" else {}
        return {**search, **self.rounding_arguments}

    @property
    def _row(self) -> WidthDefaults:
        return by_width(min(self.bits, self.narrowest), self.widths)

    @property
    def scale_name(self) -> ScaleName:
        """Method for the scales of a weight, with "auto" resolved: a search gained nothing for block-wise scales."""
        if self.rounding_scale != AUTO:
            return self.rounding_scale
        blind = self.block_size is not None or self.rounding_name == NEAREST
        return "observer" if blind else by_width(self.bits, self.widths).scale

    def off(self, why: str) -> TensorSettings:
        """Return the settings, left float because of the key `why`."""
        return replace(self, enabled=False, why=why)


def _observer_arguments(observer: Observer) -> dict[str, float | str]:
    section = getattr(observer, observer.type, None)
    keys = section.to_keys() if isinstance(section, Section) else {}
    return {name.lower(): value for name, value in keys.items()}


def _activation_settings(keys: Activations | ActivationChange) -> dict[str, Any]:
    alpha = keys.quantizer.pact.alpha_value if keys.quantizer.type == "pact" else None
    return {"layout": keys.observer.layout, "quantizer_arguments": {} if alpha is None else {"alpha": alpha}}


def _weight_settings(keys: Weights | WeightChange) -> dict[str, Any]:
    """Return the settings that only weights have."""
    name = keys.rounding.type
    rounding, arguments = keys.rounding.named("gptq" if name == AUTO else name)
    float_kind = FLOATS.get(keys.quantizer.dtype)
    of_kind = None if float_kind is None else float_kind.block
    return {
        "block_size": keys.block_size if isinstance(keys.block_size, int) else of_kind,
        "rounding": AUTO if name == AUTO else rounding,
        "rounding_arguments": {key: value for key, value in arguments.items() if value is not None},
        "rounding_scale": keys.rounding.scale,
    }


def effective(side: Side, change: Change) -> Change:
    """Return the values of `side`, overridden by those of `change`."""
    whole = side.to_keys()
    base = {name: whole[name] for name in keys_of(type(change))}
    own = change.to_keys(given=True)
    return type(change).read(overlay(base, with_rounding(own) if isinstance(change, WeightChange) else own))


@dataclass(frozen=True)
class Part:
    """Complete values of one side, or of one entry of its SPECIFIC.

    Attributes:
        side: "W" or "A".
        path: its key.
        pattern: the entry's pattern, "" for the whole side.
        keys: the values.
        narrowest: least width of the recipe's whole sides.
        widths: defaults by width.
    """

    side: str
    path: Path
    pattern: str
    keys: Side | Change
    narrowest: int
    widths: Widths

    @property
    def is_float(self) -> bool:
        """Whether this part is left float."""
        return self.keys.quantizer.disable or self.keys.quantizer.bit == FLOAT

    def missing_types(
        self,
        observers: Collection[str] | None,
        quantizers: Collection[str] | None,
        roundings: Collection[str] | None = None,
    ) -> Iterator[Wrong]:
        """Yield the requested types that are missing in these tables. None: not checked."""
        kinds = [
            ("OBSERVER", self.keys.observer.type, observers),
            ("QUANTIZER", self.keys.quantizer.type, quantizers),
        ]
        if not isinstance(self.keys, Activations | ActivationChange):
            kinds.append(("ROUNDING", self.keys.rounding.type, roundings))
        for kind, type_name, table in kinds:
            if table is not None and type_name not in table and not self.is_float:
                other = OTHER_NAMES.get(type_name)
                hint = (
                    f"{other} is what others call {type_name}"
                    if other in table
                    else suggestion(type_name, table, cutoff=0.6)
                )
                yield Wrong(f"must be {one_of(sorted(table))}", hint, path=(*self.path, kind, "TYPE"), value=type_name)

    @cached_property
    def settings(self) -> TensorSettings:
        """Settings with these values."""
        keys, why = self.keys, key_path(self.path)
        if self.is_float:
            why += ".QUANTIZER.DISABLE" if keys.quantizer.disable else ".QUANTIZER.BIT"
        if isinstance(keys, Activations | ActivationChange):
            specific = _activation_settings(keys)
        else:
            specific = _weight_settings(keys)
        return TensorSettings(
            enabled=not self.is_float,
            bits=keys.quantizer.bit,
            symmetric=is_symmetric(keys.qscheme, keys.quantizer.bit, keys.quantizer.type),
            per_channel=is_per_channel(keys.qscheme),
            quantizer=keys.quantizer.type,
            observer=keys.observer.type,
            observer_arguments=_observer_arguments(keys.observer),
            why=why,
            dtype=keys.quantizer.dtype,
            by_width=keys.qscheme == BY_WIDTH,
            narrowest=self.narrowest,
            widths=self.widths,
            **specific,
        )


Named = Mapping[str, Collection[str]]
"""Node names by pattern, for patterns that name torch modules."""


def _hits(pattern: str, node: str, op: str, tensor: str, named: Named) -> bool:
    compiled = matcher(pattern)
    return compiled.hits_node(node, op) or compiled.hits_tensor(tensor) or node in named.get(pattern, ())


def first_hit(patterns: Sequence[str], node: str, op: str, tensor: str, named: Named) -> int | None:
    """Return the position of the first of `patterns` that matches this node or tensor."""
    hits = (index for index, pattern in enumerate(patterns) if _hits(pattern, node, op, tensor, named))
    return next(hits, None)


def changes(side: Side) -> Iterator[tuple[int, str, Change]]:
    """Yield every entry of SPECIFIC in order: its position in the list, the pattern and the change."""
    entries: tuple[Mapping[str, Change], ...] = side.specific
    for index, entry in enumerate(entries):
        for pattern, change in entry.items():
            yield index, pattern, change


def changed(pattern: str, node: str, op: str, tensor: str, named: Named) -> bool:
    """Whether an entry of SPECIFIC applies to this use of this tensor; the bare tensor name matches too."""
    return _hits(pattern, node, op, tensor, named) or pattern == tensor


def tensor_hit(patterns: Collection[str], tensor: str) -> str | None:
    """Return the first of `patterns` that matches this tensor, for keys that accept tensors only."""
    return next((pattern for pattern in patterns if matcher(pattern).is_tensor(tensor)), None)
