"""Nested keys of a recipe, one class per mapping. Upper case in YAML, lower case as attributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, final

from pydantic import BeforeValidator, model_validator

from sbonnx.recipe import names, values
from sbonnx.recipe.problem import Wrong, short
from sbonnx.recipe.sections.keys import Section, key
from sbonnx.recipe.sections.rounding import Rounding


@final
class Pact(Section):
    """A.QUANTIZER.PACT: learned clipping bound of activations."""

    alpha_value: values.AboveZero | None = key(
        None, "first value of the clipping bound that `pact` learns", "above 0", shown="the calibrated range"
    )


@final
class Percentile(Section):
    """OBSERVER.PERCENTILE: clipping of the tails."""

    alpha: values.Tail = key(0.001, "share of the values that `percentile` cuts off at each end", "0 to below 0.5")


@final
class Aciq(Section):
    """OBSERVER.ACIQ: analytical clipping."""

    distribution: values.Distribution = key("gaus", "distribution that `aciq` assumes", "gaus, laplace")


@final
class MovingAverage(Section):
    """A.OBSERVER.MOVING_AVERAGE: moving average (EMA) of min and max."""

    ema_ratio: values.Ratio = key(0.9, "weight of the old value in `moving_average`", "0 to below 1")


_BIT = ("width of a code; 0 leaves the side float", "0, 2 to 16; onnxruntime: 0, 2 to 8{}; tensorrt: 0, 8")
_DTYPE = ("integers of BIT bits, or floats of 8 bits (E4M3)", "int, fp8 (tensorrt from 10 on, virtual; symmetric)")
_DISABLE = ("leave this side float", "true, false")


@final
class WeightQuantizer(Section):
    """W.QUANTIZER: type and bit width of weights."""

    type: values.WeightQuantizerName = key(
        "uniform", "how weights are rounded or trained", "uniform, dorefa, lsq, lsq+ (lsq_plus), adaround"
    )
    disable: values.Flag = key(False, *_DISABLE)
    bit: values.Bits = key(8, _BIT[0], f"{_BIT[1].format('')}; tensorrt from 10 on: 4 where inputs stay float")
    dtype: values.DtypeName = key("int", *_DTYPE, "new")


@final
class ActivationQuantizer(Section):
    """A.QUANTIZER: type and bit width of activations."""

    type: values.ActivationQuantizerName = key(
        "uniform", "how activations are quantized or trained", "uniform, dorefa, lsq, lsq+ (lsq_plus), pact"
    )
    disable: values.Flag = key(False, *_DISABLE)
    bit: values.Bits = key(8, _BIT[0], _BIT[1].format(", 16"))
    dtype: values.DtypeName = key("int", *_DTYPE, "new")
    pact: Pact = Pact()


@final
class WeightObserver(Section):
    """W.OBSERVER: range estimation of weights."""

    type: values.WeightObserverName = key(
        "minmax", "how the range of a weight is chosen", "minmax, mse, percentile, kl_histogram, aciq, auto"
    )
    percentile: Percentile = Percentile()
    aciq: Aciq = Aciq()


@final
class ActivationObserver(Section):
    """A.OBSERVER: range estimation of activations."""

    type: values.ActivationObserverName = key(
        "minmax",
        "how the range of an activation is chosen",
        "minmax, moving_average, mse, percentile, kl_histogram, aciq, auto",
        shown="minmax; mse without a recipe, for onnxruntime and tensorrt",
    )
    percentile: Percentile = Percentile()
    aciq: Aciq = Aciq()
    moving_average: MovingAverage = MovingAverage()
    layout: values.Layout = key("NCHW", "where per-channel activations have their channels: axis 1, or 2", "NCHW, NLC")


@final
class QAdd(Section):
    """A.QADD: quantization of the inputs of Add."""

    enable_quant: values.Flag | None = key(
        None, "the ancestor's spelling of QUANTIZE_INPUTS_OF.ADD", "true, false", shown="the backend decides"
    )


def _pairs(data: Any) -> Any:
    """Convert an entry of SPECIFIC to a mapping. Sparsebit's form is a list: key, value, key, value, ..."""
    if isinstance(data, Mapping):
        return data
    if not isinstance(data, list | tuple):
        raise Wrong("must be [key, value, key, value, ...] or a mapping", value=data)
    if len(data) % 2:
        raise Wrong("must be [key, value, key, value, ...]: a key or a value is missing", value=data)
    pairs: dict[str, Any] = {}
    for name, value in zip(data[::2], data[1::2], strict=True):
        if not isinstance(name, str):
            raise Wrong(f"must be [key, value, ...]: {short(name)} stands where a key should")
        if name in pairs:
            raise Wrong(f"sets {short(name)} twice")
        pairs[name] = value
    return pairs


def _refuse_types(quantizer: str, observer: str, refused: frozenset[str], home: str) -> None:
    """Refuse a type that only the other side supports, whether or not it is plugged in."""
    for part, found in (("QUANTIZER", quantizer), ("OBSERVER", observer)):
        if found in refused:
            raise Wrong(f"is for {home} only", path=(part, "TYPE"), value=found)


_SCHEME = "one scale a channel or a tensor; zero point fixed at 0 or free"
_SPECIFIC = ("other values for some nodes or tensors; the first match wins", "list of {pattern: changes}")


class _WeightSettings(Section):
    """Keys for all weights or for some."""

    qscheme: values.WeightSchemeName = key(
        "per-channel-symmetric",
        _SCHEME,
        "per-channel-symmetric, per-channel-affine, per-tensor-symmetric, per-tensor-affine; tensorrt: symmetric ones; "
        "onnxruntime: auto: per-channel-affine below 8 bits (but for quantizers that learn), else "
        "per-channel-symmetric",
        shown="per-channel-symmetric; onnxruntime: auto",
    )
    block_size: values.BlockSize = key(
        values.NO_BLOCKS,
        "how many values along the summed axis of a MatMul or Gemm share a scale",
        "none, 16, 32, 64, 128, 256; tensorrt: 64, 128 with 4 bits; onnxruntime: with MODE weight_only",
        "new",
        shown="none; tensorrt with 4 bits: 128, or 64 where that divides the axis",
    )
    quantizer: WeightQuantizer = WeightQuantizer()
    observer: WeightObserver = WeightObserver()
    rounding: Rounding = Rounding()

    @model_validator(mode="after")
    def _types_are_for_weights(self) -> _WeightSettings:
        _refuse_types(self.quantizer.type, self.observer.type, names.ONLY_ACTIVATIONS, "activations (A)")
        return self


class _ActivationSettings(Section):
    """Keys for all activations or for some."""

    qscheme: values.SchemeName = key(
        "per-tensor-affine",
        _SCHEME,
        "per-tensor-affine, per-tensor-symmetric, per-channel-affine, per-channel-symmetric; "
        "onnxruntime: per-tensor ones; tensorrt: per-tensor-symmetric",
        shown="per-tensor-affine; tensorrt: per-tensor-symmetric",
    )
    quantizer: ActivationQuantizer = ActivationQuantizer()
    observer: ActivationObserver = ActivationObserver()

    @model_validator(mode="after")
    def _types_are_for_activations(self) -> _ActivationSettings:
        _refuse_types(self.quantizer.type, self.observer.type, names.ONLY_WEIGHTS, "weights (W)")
        return self


@final
class WeightChange(_WeightSettings):
    """One entry of W.SPECIFIC; keys that it does not set keep the value of W."""

    @classmethod
    def _expand(cls, data: Any) -> Any:
        return _pairs(data)


@final
class ActivationChange(_ActivationSettings):
    """One entry of A.SPECIFIC; keys that it does not set keep the value of A."""

    @classmethod
    def _expand(cls, data: Any) -> Any:
        return _pairs(data)


WeightEntry = Annotated[dict[values.Pattern, WeightChange], BeforeValidator(values.a_mapping)]
ActivationEntry = Annotated[dict[values.Pattern, ActivationChange], BeforeValidator(values.a_mapping)]


@final
class Weights(_WeightSettings):
    """W: quantization of weights."""

    specific: Annotated[tuple[WeightEntry, ...], BeforeValidator(values.a_list)] = key((), *_SPECIFIC)


@final
class Activations(_ActivationSettings):
    """A: quantization of activations."""

    qadd: QAdd = QAdd()
    specific: Annotated[tuple[ActivationEntry, ...], BeforeValidator(values.a_list)] = key((), *_SPECIFIC)


Side = Weights | Activations
Change = WeightChange | ActivationChange


@final
class Schedule(Section):
    """SCHEDULE: batch-norm folding and tuning, placement of Q/DQ."""

    fuse_bn: values.Flag = key(
        False,
        "fold batch normalization into the linear layers before quantizing",
        "true, false",
        shown="false; true without a recipe",
    )
    bn_tuning: values.Flag = key(
        False, "tune batch normalization with quantization on, then fold it", "true, false; true wants W per channel"
    )
    disable_unnecessary_quant: values.Flag = key(
        True, "no Q/DQ between a linear layer, normalization or Add and the activation after it", "true, false"
    )


_DECIDES = "the backend decides"


@final
class QuantizeInputsOf(Section):
    """QUANTIZE_INPUTS_OF: operators whose inputs are quantized."""

    add: values.Flag | None = key(None, "inputs of Add", "true, false", "new", shown=_DECIDES)
    concat: values.Flag | None = key(None, "inputs of Concat", "true, false", "new", shown=_DECIDES)
    pool: values.Flag | None = key(
        None, "inputs of averaging pools and ReduceMean", "true, false", "new", shown=_DECIDES
    )
    softmax: values.Flag | None = key(None, "inputs of Softmax and its kin", "true, false", "new", shown=_DECIDES)
    norm: values.Flag | None = key(
        None, "inputs of normalizations that were not folded", "true, false", "new", shown=_DECIDES
    )
    elementwise: values.Flag | None = key(
        None, "inputs of Mul, Sub and Div of two tensors", "true, false", "new", shown=_DECIDES
    )
    resize: values.Flag | None = key(None, "inputs of Resize", "true, false", "new", shown=_DECIDES)
    embedding: values.Flag | None = key(None, "tables read by Gather", "true, false", "new", shown=_DECIDES)
    matmul: values.Flag | None = key(
        None, "inputs of a MatMul of two activations", "true, false", "new", shown=_DECIDES
    )


@final
class SideBits(Section):
    """FIRST_BITS and LAST_BITS: a bit width for each side, written ``{W: 8, A: 8}``, ``w8a8`` or ``8``."""

    w: values.Bits | None = key(None, "width of the weight", "0, 2 to 16", "new", shown="that of W")
    a: values.Bits | None = key(None, "width of the inputs", "0, 2 to 16", "new", shown="that of A")

    @classmethod
    def _expand(cls, data: Any) -> Any:
        return data if data is None or isinstance(data, Mapping) else values.both_bits(data)
