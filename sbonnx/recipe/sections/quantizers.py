"""W, A, SCHEDULE, QUANTIZE_INPUTS_OF and bit widths: how tensors are quantized. One class per mapping of the YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, final

from sbonnx.recipe import names
from sbonnx.recipe.problem import Wrong
from sbonnx.recipe.sections import flags
from sbonnx.recipe.sections.base import Section, from_pairs, key, new_key
from sbonnx.recipe.sections.flags import Flag

if TYPE_CHECKING:
    from sbonnx.recipe import value_types


ScaleName = Literal["observer", "search", "hqq"]
ScaleSetting = Literal["auto", ScaleName]

AUTO: Final = "auto"
"""The rounding chosen by bit width and by whether there are data."""


@final
class Pact(Section):
    """A.QUANTIZER.PACT: learned clipping bound of activations."""

    alpha_value: value_types.AboveZero | None = key(
        None,
        "first value of the clipping bound that `pact` learns",
        "above 0",
        shown="the calibrated range",
        example="10",
    )


class PercentileKeys(Section):
    """OBSERVER.PERCENTILE: clipping of the tails."""

    alpha: value_types.Tail = key(0.001, "share of the values that `percentile` cuts off at each end", "0 to below 0.5")


class AciqKeys(Section):
    """OBSERVER.ACIQ: analytical clipping."""

    distribution: value_types.Distribution = key("gaus", "distribution that `aciq` assumes", "gaus, laplace")


class MovingAverageKeys(Section):
    """A.OBSERVER.MOVING_AVERAGE: moving average (EMA) of min and max."""

    ema_ratio: value_types.Ratio = key(0.9, "weight of the old value in `moving_average`", "0 to below 1")


_BIT = ("width of a code; 0 leaves the side float", "0, 2 to 16")
_OF_FLOATS = "fp8 (tensorrt from 10 on, virtual; symmetric)"
_DTYPE = ("integers of BIT bits, or floats of 8 bits (E4M3)", f"int, {_OF_FLOATS}")
_WEIGHT_DTYPE = (
    "integers of BIT bits, or floats of 8 bits (E4M3) or, with scales of blocks, of 8 or 4 bits",
    f"int, {_OF_FLOATS}; with MODE: weight_only nvfp4 (tensorrt from 10 on, virtual), mxfp4 and mxfp8 (virtual)",
)
_DISABLE = ("leave this side float", "true, false")


@final
class WeightQuantizer(Section):
    """W.QUANTIZER: type and bit width of weights."""

    type: value_types.WeightQuantizerName = key(
        "uniform",
        "rounding or training of weights",
        "uniform, dorefa, lsq, lsq+ (lsq_plus), adaround",
        forms="w_quantizer",
    )
    disable: value_types.Flag = key(False, *_DISABLE)
    bit: value_types.Bits = key(8, *_BIT, forms="w_bit")
    dtype: value_types.DtypeName = new_key("int", *_WEIGHT_DTYPE)


@final
class ActivationQuantizer(Section):
    """A.QUANTIZER: type and bit width of activations."""

    type: value_types.ActivationQuantizerName = key(
        "uniform",
        "quantization or training of activations",
        "uniform, dorefa, lsq, lsq+ (lsq_plus), pact",
        forms="a_quantizer",
    )
    disable: value_types.Flag = key(False, *_DISABLE)
    bit: value_types.Bits = key(8, *_BIT, forms="a_bit")
    dtype: value_types.DtypeName = new_key("int", *_DTYPE)
    pact: Pact = Pact()


@final
class WeightObserver(Section):
    """W.OBSERVER: range estimation of weights."""

    type: value_types.WeightObserverName = key(
        "minmax",
        "choice of the range of a weight",
        "minmax, mse, percentile, kl_histogram, aciq, auto",
        forms="w_observer",
    )
    percentile: PercentileKeys = PercentileKeys()
    aciq: AciqKeys = AciqKeys()


@final
class ActivationObserver(Section):
    """A.OBSERVER: range estimation of activations."""

    type: value_types.ActivationObserverName = key(
        "minmax",
        "choice of the range of an activation",
        "minmax, moving_average, mse, percentile, kl_histogram, aciq, auto",
        forms="a_observer observer",
        flag=Flag(
            "--observer NAME",
            "How ranges of activations are chosen: minmax, moving_average, mse, percentile, kl_histogram, "
            "aciq or auto.",
            flags.QUANTIZATION,
            shown="mse",
        ),
    )
    percentile: PercentileKeys = PercentileKeys()
    aciq: AciqKeys = AciqKeys()
    moving_average: MovingAverageKeys = MovingAverageKeys()
    layout: value_types.Layout = key(
        "NCHW", "where per-channel activations have their channels: axis 1, or 2", "NCHW, NLC"
    )


@final
class QAdd(Section):
    """A.QADD: quantization of the inputs of Add."""

    enable_quant: value_types.Flag | None = key(
        None, "the ancestor's spelling of QUANTIZE_INPUTS_OF.ADD", "true, false", shown="the backend decides"
    )


def _refuse_types(quantizer: str, observer: str, refused: frozenset[str], home: str) -> None:
    """Refuse a type that only the other side supports, whether or not it is plugged in."""
    for part, type_name in (("QUANTIZER", quantizer), ("OBSERVER", observer)):
        if type_name in refused:
            raise Wrong(f"is for {home} only", path=(part, "TYPE"), value=type_name)


class GptqKeys(Section):
    """W.ROUNDING.GPTQ: rounding by second moments (Hessian), with error compensation."""

    damping: value_types.AboveZero = new_key(
        0.01, "share of the mean second moment that is added to all of them", "above 0"
    )
    order: Annotated[Literal["pivot", "activation", "none"], value_types.ANY_CASE] = new_key(
        "pivot",
        "inputs in the order of least error, by falling second moment, or as they come",
        "pivot, activation, none",
    )
    beams: value_types.Count | None = new_key(
        None,
        "choices of codes that each output keeps in play; 1 is plain GPTQ",
        "1 or more",
        shown="16; from 8 bits on 4 (EFFORT best: 16)",
        example="16",
    )
    steps: value_types.CountOrNone | None = new_key(
        None,
        "steps of tabu search afterwards, of one code each, for each input of an output",
        "0 or more",
        shown="8; from 8 bits on 0 (EFFORT best: 8)",
        example="8",
    )
    sweeps: value_types.CountOrNone | None = new_key(
        None,
        "passes of coordinate descent over the codes afterwards, while any changes",
        "0 or more",
        shown="20; from 8 bits on 2 (EFFORT best: 20)",
        example="20",
    )


class AdaRoundKeys(Section):
    """W.ROUNDING.ADAROUND: rounding up or down, learned by gradient descent."""

    iterations: value_types.Count = new_key(1000, "steps of Adam", "1 or more")
    lr: value_types.AboveZero = new_key(0.1, "its learning rate", "above 0")
    warmup: value_types.Ratio = new_key(0.2, "share of the steps before the pull to whole codes begins", "0 to below 1")
    weight: value_types.AboveZero = new_key(
        0.2, "weight of that pull, against the error of one code in one weight", "above 0"
    )
    beta_start: value_types.AboveZero = new_key(20.0, "its exponent at the beginning", "above 0")
    beta_end: value_types.AboveZero = new_key(2.0, "and at the end", "above 0")
    schedule: value_types.Ramp = new_key("cosine", "how the exponent goes from one to the other", "cosine, linear")
    start: value_types.Start = new_key("gptq", "the codes to begin with", "gptq, nearest")
    sweeps: value_types.CountOrNone = new_key(
        20, "passes of coordinate descent between the two codes afterwards, while any changes", "0 or more"
    )


class AdaQuantKeys(Section):
    """W.ROUNDING.ADAQUANT: weights and scales learned by gradient descent."""

    iterations: value_types.Count = new_key(500, "steps of Adam", "1 or more")
    lr: value_types.AboveZero = new_key(0.01, "its learning rate for weights, in codes", "above 0")
    scale_lr: value_types.AboveZero = new_key(0.003, "its learning rate for scales, relative", "above 0")
    start: value_types.Start = new_key("gptq", "the codes to begin with", "gptq, nearest")
    sweeps: value_types.CountOrNone = new_key(
        20, "passes of coordinate descent each time codes and scales are fitted to each other", "0 or more"
    )


@final
class Rounding(Section):
    """W.ROUNDING: method of weight rounding; a name stands for ``{TYPE: name}``."""

    short_form: ClassVar[str] = "TYPE"

    type: value_types.RoundingName = new_key(
        AUTO,
        "rounding of weights to codes",
        "auto (gptq where there are data: for convolutions, and for all layers where the weight, W or A has fewer than "
        "8 bits; else nearest), nearest, gptq, adaround, adaquant",
        forms="rounding",
    )
    scale: Annotated[ScaleSetting, value_types.ANY_CASE] = new_key(
        AUTO,
        "source of the scales of weights: W.OBSERVER, least error of the layer's output, or W.OBSERVER with "
        "half-quadratic zero points (affine weights only)",
        "auto (search below 8 bits where the rounding looks at inputs, but for blocks, else observer), observer, "
        "search, hqq",
        forms="weight_scale",
    )
    gptq: GptqKeys = GptqKeys()
    adaround: AdaRoundKeys = AdaRoundKeys()
    adaquant: AdaQuantKeys = AdaQuantKeys()

    def named(self, name: str) -> tuple[str, dict[str, float | str | bool | None]]:
        """Return the rounding method for `name`, and its keyword arguments; None: by width and EFFORT."""
        chosen = {"gptq": self.gptq, "adaround": self.adaround, "adaquant": self.adaquant}.get(name)
        return name, {} if chosen is None else {row.lower(): value for row, value in chosen.to_keys().items()}


_SCHEME = "one scale a channel or a tensor; zero point fixed at 0 or free"
_SPECIFIC = ("other values for some nodes or tensors; the first match wins", "list of {pattern: changes}")


class _WeightSettings(Section):
    """Keys for all weights or for some."""

    qscheme: value_types.WeightSchemeName = key(
        "per-channel-symmetric",
        _SCHEME,
        "auto (per-channel-affine below 8 bits, but for quantizers that learn; per-tensor-affine where a backend has "
        "one scale; else per-channel-symmetric), per-channel-symmetric, per-channel-affine, per-tensor-symmetric, "
        "per-tensor-affine",
        forms="w_qscheme",
    )
    block_size: value_types.BlockSize = new_key(
        "none",
        "number of values along the summed axis of a MatMul or Gemm that share a scale",
        "none, 16, 32, 64, 128, 256; tensorrt: 64, 128 with 4 bits; onnxruntime and openvino: with MODE weight_only",
        shown="none; tensorrt with 4 bits: 128, or 64 where that divides the axis",
        forms="block_size",
        flag=Flag(
            "--block-size N",
            "Number of values along the summed axis of a MatMul weight that share a scale.",
            flags.QUANTIZATION,
        ),
    )
    quantizer: WeightQuantizer = WeightQuantizer()
    observer: WeightObserver = WeightObserver()
    rounding: Rounding = Rounding()

    def _check(self) -> None:
        _refuse_types(self.quantizer.type, self.observer.type, names.ONLY_ACTIVATIONS, "activations (A)")


class _ActivationSettings(Section):
    """Keys for all activations or for some."""

    qscheme: value_types.SchemeName = key(
        "per-tensor-affine",
        _SCHEME,
        "per-tensor-affine, per-tensor-symmetric, per-channel-affine, per-channel-symmetric",
        forms="a_qscheme",
    )
    quantizer: ActivationQuantizer = ActivationQuantizer()
    observer: ActivationObserver = ActivationObserver()

    def _check(self) -> None:
        _refuse_types(self.quantizer.type, self.observer.type, names.ONLY_WEIGHTS, "weights (W)")


@final
class WeightChange(_WeightSettings):
    """One entry of W.SPECIFIC; keys that it does not set keep the value of W."""

    @classmethod
    def _expand(cls, data: Any) -> Any:
        return from_pairs(data)


@final
class ActivationChange(_ActivationSettings):
    """One entry of A.SPECIFIC; keys that it does not set keep the value of A."""

    @classmethod
    def _expand(cls, data: Any) -> Any:
        return from_pairs(data)


@final
class Weights(_WeightSettings):
    """W: quantization of weights."""

    specific: Annotated[
        tuple[Annotated[dict[value_types.Pattern, WeightChange], value_types.MAPPING], ...], value_types.LIST
    ] = key((), *_SPECIFIC, example='[{"/conv1/Conv": [QUANTIZER.BIT, 8, OBSERVER.TYPE, mse]}]')


@final
class Activations(_ActivationSettings):
    """A: quantization of activations."""

    qadd: QAdd = QAdd()
    specific: Annotated[
        tuple[Annotated[dict[value_types.Pattern, ActivationChange], value_types.MAPPING], ...], value_types.LIST
    ] = key((), *_SPECIFIC, example='[{"op:Softmax": {QUANTIZER.DISABLE: true}}]')


Side = Weights | Activations
Change = WeightChange | ActivationChange


@final
class ScheduleKeys(Section):
    """SCHEDULE: batch-norm folding and tuning, placement of Q/DQ."""

    fuse_bn: value_types.Flag = key(
        True, "fold batch normalization into the linear layers before quantizing", "true, false", forms="fuse_bn"
    )
    bn_tuning: value_types.Flag = key(
        False,
        "tune batch normalization with quantization on, then fold it",
        "true, false; true wants W per channel",
        forms="bn_tuning",
    )
    disable_unnecessary_quant: value_types.Flag = key(
        True, "no Q/DQ between a linear layer, normalization or Add and the activation after it", "true, false"
    )


def _inputs(meaning: str) -> Any:
    """Define a key for the quantization of some inputs."""
    return new_key(None, meaning, "true, false", shown="the backend decides")


@final
class QuantizeInputsOf(Section):
    """QUANTIZE_INPUTS_OF: operators whose inputs are quantized."""

    add: value_types.Flag | None = _inputs("inputs of Add")
    concat: value_types.Flag | None = _inputs("inputs of Concat")
    pool: value_types.Flag | None = _inputs("inputs of averaging pools and ReduceMean")
    softmax: value_types.Flag | None = _inputs("inputs of Softmax and its kin")
    norm: value_types.Flag | None = _inputs("inputs of normalizations that were not folded")
    elementwise: value_types.Flag | None = _inputs("inputs of Mul, Sub and Div of two tensors")
    resize: value_types.Flag | None = _inputs("inputs of Resize")
    embedding: value_types.Flag | None = _inputs(
        "tables read by Gather (by default, of at least 32 rows of 32 values, and of vocabularies with weight_only)"
    )
    matmul: value_types.Flag | None = _inputs("inputs of a MatMul of two activations")


@final
class SideBits(Section):
    """FIRST_BITS and LAST_BITS: a bit width for each side, written ``{W: 8, A: 8}``, ``w8a8``, ``w8`` or ``8``."""

    w: value_types.Bits | None = new_key(None, "width of the weight", "0, 2 to 16", shown="that of W")
    a: value_types.Bits | None = new_key(None, "width of the inputs", "0, 2 to 16", shown="that of A")

    @classmethod
    def _expand(cls, data: Any) -> Any:
        from sbonnx.recipe.value_types import bits_by_side

        return data if data is None or isinstance(data, Mapping) else bits_by_side(data)
