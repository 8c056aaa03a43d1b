"""Names that a recipe may use, their canonical spelling, and the meaning of schemes."""

from __future__ import annotations

from typing import Final, Literal, get_args

from sbonnx.schemes import BY_WIDTH, VERSIONS
from sbonnx.system.cpu import CPUS, THIS

SideName = Literal["w", "a"]
Place = Literal["", "first", "last"]
Mode = Literal["static", "dynamic", "weight_only"]
OutputTask = Literal["classification", "segmentation", "tokens", "detection", "embedding", "regression"]
GraphEnds = Literal["both", "inputs", "outputs", "none"]

PruningTypeName = Literal["structured", "unstructured"]
PruningStrategyName = Literal["auto", "obs", "output", "l1norm", "l2norm", "random"]

VERSIONED: Final = tuple(f"tensorrt@{version}" for version in VERSIONS)
"""Backend names with a version."""

BACKEND_ALIASES: Final = {
    "ort": "onnxruntime",
    "onnx": "onnxruntime",
    "cpu": "onnxruntime",
    "trt": "tensorrt",
    "ov": "openvino",
}
"""Short names of backends, with or without a version: ``trt@10``."""

QUANTIZERS: Final = ("uniform", "dorefa", "lsq", "lsq+", "pact", "adaround")
"""Quantizer types of Sparsebit. Others may be plugged in: `Recipe.check_types` checks them."""

LEARNED: Final = ("dorefa", "lsq", "lsq+", "pact")
"""Quantizer types that need training; without it their tensors are calibrated with the observer."""

ROUNDINGS: Final = ("auto", "nearest", "gptq", "adaround", "adaquant")
"""Methods of weight rounding; others may be plugged in."""

OBSERVERS: Final = ("minmax", "moving_average", "mse", "percentile", "kl_histogram", "aciq", "auto")
"""Observer types of Sparsebit, and `auto`; others may be plugged in."""

ALIASES: Final = {"lsq_plus": "lsq+", "lsqplus": "lsq+"}
"""Alternative spellings of types in Sparsebit's documents."""

ONLY_INTEGERS: Final = frozenset({"kl_histogram", "aciq"})
"""Observers whose formulas assume uniform steps, which fp8 does not have."""

ONLY_WEIGHTS: Final = frozenset({"adaround"})
ONLY_ACTIVATIONS: Final = frozenset({"pact", "moving_average"})

OUTPUT_TASKS: Final[tuple[str, ...]] = get_args(OutputTask)
"""Meanings of outputs that VERIFY.TASK names, see `sbonnx.verify.output_tasks`."""

MODES: Final[tuple[str, ...]] = get_args(Mode)

FLOAT: Final = 0
"""The bit width for float, not quantized. Every backend accepts it."""

FULL_BITS: Final = 8
"""From this width on rounding to nearest suffices, see `sbonnx.recipe.defaults.BY_WIDTH`."""

NEAREST: Final = "nearest"

UNIFORM: Final = "uniform"
"""Sparsebit's name of plain quantization, whose rounding is set by W.ROUNDING."""

FILE_KEYS: Final = {
    "CALIBRATION.CACHE": ("none",),
    "TENSOR_OVERRIDES": ("none",),
    "KERNEL_COSTS": ("bundled", "none"),
    "CPU": (THIS, *CPUS),
}
"""Keys whose value is the path of a file or folder, with the words that it can be instead."""

_BATCHES = "It was for LOSS: batches, which was removed too"

REMOVED: Final = {
    "ADAROUND.LOSS": "AdaRound is by second moments, as accurate and 30 times faster. Below 4 bits, train: sbonnx qat",
    "ADAROUND.SCOPE": _BATCHES,
    "ADAROUND.DROP": _BATCHES,
    "ADAROUND.SCALE_LR": _BATCHES,
    "EQUALIZE.SPLIT_CHANNELS": "Write W.QSCHEME: per-channel-symmetric, which is more accurate in a smaller file",
    "CALIBRATION.WORKERS": "It had no effect: samples run on CALIBRATION.THREADS",
}
"""Keys of earlier versions by the last two parts of their path, and what to do now."""

REMOVED_FORMS: Final = {"split_channels": "EQUALIZE.SPLIT_CHANNELS", "workers": "CALIBRATION.WORKERS"}
"""Short forms of key paths that were removed."""

REMOVED_DEFAULTS: Final = {"ADAROUND.LOSS": "moments", "EQUALIZE.SPLIT_CHANNELS": 0}
"""Values of keys in `REMOVED` that ask for nothing. Other keys there do nothing alone."""

AUGMENTATIONS: Final = ("flip", "shift", "cutmix", "mixup")
"""Augmentations of images in training."""

PRUNING_ALIASES: Final = {"structed": "structured", "unstructed": "unstructured"}
"""Sparsebit's spelling of SPARSE.TYPE."""


def full_backend(backend: str) -> str:
    """Return the full name of a backend in lower case, with its version: ``TRT@10`` -> ``tensorrt@10``."""
    name, at, version = backend.lower().partition("@")
    return f"{BACKEND_ALIASES.get(name, name)}{at}{version}"


def is_per_channel(scheme: str) -> bool:
    """Whether a scheme has one scale per channel."""
    return scheme == BY_WIDTH or scheme.startswith("per-channel-")
