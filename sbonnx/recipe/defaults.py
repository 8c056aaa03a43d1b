"""Defaults of a recipe that depend on backend, mode or the width of a weight, and those of Sparsebit.

`complete` fills them in after all sources are merged: file or dict, keywords, flags, job file. Keys with one default
have it in `sbonnx.recipe.sections`. ``auto`` for a weight is resolved by `EFFORTS`. With ``DEFAULTS: sparsebit``, keys
that no source sets have the values of `SPARSEBIT`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from sbonnx.backends import BACKENDS, versions_of
from sbonnx.backends.mode_limits import STATIC
from sbonnx.backends.virtual import VIRTUAL
from sbonnx.ops import CONVOLUTIONS
from sbonnx.recipe.names import FLOAT, FULL_BITS, LEARNED, NEAREST, UNIFORM
from sbonnx.recipe.problem import Wrong, key_path
from sbonnx.recipe.sections.base import nested_value, overlay
from sbonnx.recipe.sections.quantizers import ScaleName
from sbonnx.recipe.value_types import MAX_BITS, type_name
from sbonnx.schemes import BY_WIDTH, Scheme
from sbonnx.small_floats import FLOATS

BACKEND: Final = "onnxruntime"
"""Backend if no source names one."""

SYMMETRIC: Final = "per-channel-symmetric"

TWINS: Final = (("A", "QADD", "ENABLE_QUANT"), ("QUANTIZE_INPUTS_OF", "ADD"))
"""Two spellings of one key: Sparsebit's, and that of sbonnx."""


@dataclass(frozen=True)
class WidthDefaults:
    """Values of ``auto`` for weights of some widths.

    Attributes:
        below: for widths below this one.
        scheme: W.QSCHEME.
        rounding: W.ROUNDING.TYPE where there are data; without, "nearest". Here the least of the widths of the weight,
            W and A counts: a rounding that sees inputs makes up for the error of narrow layers before it. At W4A4, 11
            layers of ResNet-20 raised to 8 bits lose 2.3 dB if they are rounded to nearest, and gain 0.3 by gptq.
        scale: W.ROUNDING.SCALE.
        ops: operators that are rounded so, others to nearest; None: all.
        search: arguments of gptq that differ from those of `sbonnx.rounding.gptq.Gptq`.
        samples: number of samples that the rounding sees; None: all.
    """

    below: int
    scheme: Scheme
    rounding: str
    scale: ScaleName
    ops: frozenset[str] | None = None
    search: Mapping[str, int] = field(default_factory=dict)
    samples: int | None = None


Widths: TypeAlias = tuple[WidthDefaults, ...]

DEFAULT: Final = "default"

ONE_BEAM: Final = {"beams": 1, "steps": 0, "sweeps": 2}
FEW_BEAMS: Final = {"beams": 4, "steps": 0, "sweeps": 2}

# At 4 bits a zero point per channel gains 0.6 to 1.7 dB, and costs nothing if it is folded into the codes. At 8 bits
# the rounding of matrix products adds little to the error of their inputs (MiniLM: a cosine of 0.9957 or 0.9954), that
# of convolutions much (SqueezeNet: 32.9 or 36.3 dB); 4 beams and 32 samples are as good there as 16 and all samples.
EFFORTS: Final[Mapping[str, Widths]] = {
    "fast": (
        WidthDefaults(FULL_BITS, "per-channel-affine", "gptq", "observer", search=ONE_BEAM, samples=64),
        WidthDefaults(MAX_BITS + 1, SYMMETRIC, NEAREST, "observer", samples=16),
    ),
    DEFAULT: (
        WidthDefaults(FULL_BITS, "per-channel-affine", "gptq", "search"),
        WidthDefaults(MAX_BITS + 1, SYMMETRIC, "gptq", "observer", CONVOLUTIONS, FEW_BEAMS, 32),
    ),
    "best": (
        WidthDefaults(FULL_BITS, "per-channel-affine", "gptq", "search"),
        WidthDefaults(MAX_BITS + 1, SYMMETRIC, "gptq", "observer", CONVOLUTIONS),
    ),
}
"""Defaults by EFFORT and width, narrowest first; float has those of the widest."""


def widths_of(effort: str, mode: str) -> Widths:
    """Return the defaults by width. Without static activations, 8 bits are rounded to nearest: data are optional."""
    rows = EFFORTS[effort]
    if mode == STATIC:
        return rows
    return tuple(replace(row, rounding=NEAREST) if row.below > FULL_BITS else row for row in rows)


def by_width(bits: int, widths: Widths = EFFORTS[DEFAULT]) -> WidthDefaults:
    """Return the defaults of weights of `bits` bits; 0: float."""
    return next((row for row in widths if FLOAT < bits < row.below), widths[-1])


def is_symmetric(scheme: str, bits: int, quantizer: str) -> bool:
    """Whether a scheme has a fixed zero point. Quantizers that learn their scales are symmetric with "auto"."""
    chosen = scheme if scheme != BY_WIDTH else SYMMETRIC if quantizer in LEARNED else by_width(bits).scheme
    return chosen.endswith("-symmetric")


SPARSEBIT: Final[Mapping[str, Any]] = {
    "BACKEND": "virtual",
    "SCHEDULE": {"FUSE_BN": False},
    "W": {"OBSERVER": {"TYPE": "minmax"}, "ROUNDING": {"TYPE": NEAREST}},
    "A": {
        "OBSERVER": {"TYPE": "minmax"},
        "QADD": {"ENABLE_QUANT": False},
        "QUANTIZER": {"PACT": {"ALPHA_VALUE": 10.0}},
    },
    "QUANTIZE_INPUTS_OF": {"ADD": False},
    "SCALE_RULE": "sparsebit",
    "KERNEL_COSTS": "none",
    "REDUCE_RANGE": False,
    "BIAS_CORRECTION": "none",
    "EQUALIZE": {"SMOOTH_QUANT": False},
    "CALIBRATION": {"ASYM": {"ENABLE": False}},
    "VERIFY": {"HELD_OUT": 0.0},
}
"""Sparsebit's defaults, and for keys that it does not have, what it does. QSCHEME and BIT have no default there."""


def complete(data: dict[str, Any]) -> dict[str, Any]:
    """Fill in the defaults for keys that `data` (canonical keys) lacks, and both spellings of keys that have two.

    Raises:
        Wrong: two spellings of a setting differ.
    """
    data = _with_twins(_with_version(data))
    if isinstance(data.get("W"), dict):
        data = {**data, "W": with_rounding(data["W"])}
    weights = FLOATS.get(dtype_of(data, "W"))
    if weights is not None and weights.block is not None:
        data = overlay({"MODE": "weight_only", "W": {"QUANTIZER": {"BIT": weights.bits}}}, data)
    theirs = SPARSEBIT if str(data.get("DEFAULTS")).lower() == "sparsebit" else {}
    backend = data.get("BACKEND", theirs.get("BACKEND", BACKEND))
    ours = _by_backend(str(backend).lower(), str(data.get("MODE", STATIC)).lower())
    for side in ("W", "A"):
        if dtype_of(data, side) in FLOATS:  # they have no zero point
            symmetric = ours[side]["QSCHEME"].replace("-affine", "-symmetric")
            ours = overlay(ours, {side: {"QSCHEME": symmetric}})
    return overlay(overlay({"BACKEND": backend, **ours}, theirs), data)


def dtype_of(data: Mapping[str, Any], side: str) -> Any:
    """Return DTYPE of a side as written, in lower case; "none" if absent."""
    return str(value_at(data, (side, "QUANTIZER", "DTYPE"))).lower()


def _by_backend(backend: str, mode: str) -> dict[str, Any]:
    """Return the defaults of a backend in a mode, in the keys of the YAML.

    They are those of static for a mode that the backend lacks, and those of "virtual" for an unknown backend (both are
    refused elsewhere).
    """
    modes = BACKENDS.get(backend, VIRTUAL).modes
    limits = modes.get(mode, modes[STATIC])
    sides = {
        name: {"QSCHEME": side.scheme, "QUANTIZER": {"BIT": side.width}, "OBSERVER": {"TYPE": side.observer}}
        for name, side in limits.sides.items()
    }
    return {**sides, **limits.defaults}


def with_rounding(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Set ROUNDING.TYPE in the keys of W, or of an entry of its SPECIFIC, if QUANTIZER.TYPE names a rounding.

    ``QUANTIZER: {TYPE: adaround}`` is Sparsebit's spelling. An explicit ROUNDING.TYPE wins.
    """
    try:
        name = type_name(value_at(weights, ("QUANTIZER", "TYPE")))
    except Wrong:  # absent, or invalid, which validation reports
        return dict(weights)
    return dict(weights) if name in (UNIFORM, *LEARNED) else overlay({"ROUNDING": {"TYPE": name}}, weights)


def _with_version(data: dict[str, Any]) -> dict[str, Any]:
    """Split ``BACKEND: tensorrt@10`` into BACKEND and VERSION; without one, a backend with versions gets the newest."""
    backend, given = data.get("BACKEND"), data.get("VERSION")
    if not isinstance(backend, str):
        return data
    name, at, version = backend.partition("@")
    versions = versions_of(name.lower())
    if not versions or (at and version not in versions):
        return data  # invalid names are reported by validation
    if not at:
        return {**data, "VERSION": versions[0] if given is None else given}
    if given is not None and str(given).removesuffix(".0") != version:
        raise Wrong(f"contradicts BACKEND: {backend}: drop one", path=("VERSION",), value=given)
    return {**data, "BACKEND": name, "VERSION": version}


def _with_twins(data: dict[str, Any]) -> dict[str, Any]:
    """Set both spellings of ADD in `data` if one is set."""
    first, second = TWINS
    theirs, ours = value_at(data, first), value_at(data, second)
    if theirs is None and ours is None:
        return data
    if theirs is None or ours is None:
        given, missing = (theirs, second) if ours is None else (ours, first)
        return overlay(data, nested_value(missing, given))
    if isinstance(theirs, bool) and isinstance(ours, bool) and theirs != ours:
        raise Wrong(f"contradicts {key_path(second)}, another spelling of it: drop one", path=first, value=theirs)
    return data


def value_at(data: Any, path: Sequence[str]) -> Any:
    """Return the value at a key path of nested mappings, or None."""
    for part in path:
        data = data.get(part) if isinstance(data, Mapping) else None
    return data
