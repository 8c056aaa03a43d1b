"""Limits and defaults of each backend, in one table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from sbonnx.recipe import names
from sbonnx.recipe.problem import Path, Wrong, one_of
from sbonnx.recipe.sections.layers import SideBits
from sbonnx.recipe.types import symmetric_for
from sbonnx.recipe.values import MAX_BITS, MIN_BITS

FLOAT: Final = 0
"""The bit width for float, not quantized. Every backend accepts it."""


@dataclass(frozen=True)
class SideLimits:
    """Allowed bit widths and schemes of one side (weights or activations), and the defaults."""

    bits: tuple[int, ...]
    schemes: tuple[str, ...]
    default_scheme: str
    default_bits: int = 8
    default_observer: str = "minmax"


_ANY_BITS = tuple(range(MIN_BITS, MAX_BITS + 1))
_BYTES = tuple(range(MIN_BITS, 8 + 1))

LIMITS: Final[dict[str, dict[str, SideLimits]]] = {
    "virtual": {
        "W": SideLimits(_ANY_BITS, names.SCHEMES, "per-channel-symmetric"),
        "A": SideLimits(_ANY_BITS, names.SCHEMES, "per-tensor-affine"),
    },
    "onnxruntime": {
        # at 4 bits a zero point per channel gains 0.6 to 1.7 dB, and costs nothing if it is folded into the codes
        "W": SideLimits(_BYTES, names.WEIGHT_SCHEMES, names.BY_WIDTH),
        "A": SideLimits((*_BYTES, 16), ("per-tensor-affine", "per-tensor-symmetric"), "per-tensor-affine"),
    },
    "tensorrt": {
        "W": SideLimits((4, 8), ("per-channel-symmetric", "per-tensor-symmetric"), "per-channel-symmetric"),
        "A": SideLimits((8,), ("per-tensor-symmetric",), "per-tensor-symmetric"),
    },
}


STATIC: Final = "static"
"""The mode that `LIMITS` describes."""

_PER_CHANNEL = ("per-channel-symmetric", "per-channel-affine")
_SYMMETRIC = ("per-channel-symmetric", "per-tensor-symmetric")
_UNUSED = SideLimits(_ANY_BITS, names.SCHEMES, "per-tensor-affine")

MODE_LIMITS: Final[dict[tuple[str, str], dict[str, SideLimits]]] = {
    # unsigned weights (affine ones) run no faster than float
    ("onnxruntime", "dynamic"): {
        "W": SideLimits((8,), _SYMMETRIC, "per-channel-symmetric"),
        "A": SideLimits((8,), ("per-tensor-affine",), "per-tensor-affine"),
    },
    # at 4 bits a zero point gains 0.9 dB and an MSE-optimal range another 0.3, for an eighth of a bit per weight
    ("onnxruntime", "weight_only"): {
        "W": SideLimits(_BYTES, _PER_CHANNEL, "per-channel-affine", 4, "mse"),
        "A": _UNUSED,
    },
    ("tensorrt", "weight_only"): {
        "W": SideLimits((4,), ("per-channel-symmetric",), "per-channel-symmetric", 4, "mse"),
        "A": SideLimits(_ANY_BITS, names.SCHEMES, "per-tensor-symmetric"),
    },
    ("virtual", "weight_only"): {
        "W": SideLimits(_ANY_BITS, names.SCHEMES, "per-channel-symmetric", 4, "mse"),
        "A": _UNUSED,
    },
}
"""Limits of the other modes; the backend does not support a mode that is missing here. Activations of weight_only stay
float, so that none of their settings can be invalid."""


def sides(backend: str, mode: str) -> dict[str, SideLimits]:
    """Return the limits of both sides; those of static if the backend lacks the mode (which is refused elsewhere)."""
    return MODE_LIMITS.get((backend, mode), LIMITS[backend])


def check_mode(backend: str, mode: str, form: str, weights: str) -> Iterator[Wrong]:
    """Check that the backend supports a mode, a file format and a form of the weights."""
    if mode != STATIC and (backend, mode) not in MODE_LIMITS:
        modes = [STATIC, *(name for owner, name in MODE_LIMITS if owner == backend)]
        hint = "only onnxruntime has kernels that compute the scales of activations as the model runs"
        yield Wrong(f"must be {one_of(modes)} for the backend {backend}", hint, path=("MODE",), value=mode)
    if form == "qoperator" and backend != "onnxruntime":
        hint = "QLinearConv and its kin are onnxruntime's"
        yield Wrong(f"must be qdq for the backend {backend}", hint, path=("FORMAT",), value=form)
    elif form == "qoperator" and mode != STATIC:
        yield Wrong(f"must be qdq with MODE: {mode}", "It is integer ops already", path=("FORMAT",), value=form)
    if weights == "qdq" and backend == "onnxruntime" and (mode, form) != (STATIC, "qdq"):
        what = f"MODE: {mode}" if mode != STATIC else f"FORMAT: {form}"
        yield Wrong(f"must be codes with {what}", "Integer ops read codes", path=("WEIGHTS",), value=weights)


def defaults(backend: str) -> dict[str, Any]:
    """Return the default recipe of a backend, in the keys of the YAML.

    For a runtime, activations get the range of least squared error (mse observer). On trained models it is closer to
    float than min-max on both runtimes (docs/results.md). A recipe without the key has min-max, as in Sparsebit.
    """
    found: dict[str, Any] = {"BACKEND": backend, "SCHEDULE": {"FUSE_BN": True}}
    if backend.partition("@")[0] != "virtual":
        found["A"] = {"OBSERVER": {"TYPE": "mse"}}
    return found


def check_precision(backend: str, version: str | None, kind: str) -> Iterator[Wrong]:
    """Check that the backend supports this type for the float part of the graph."""
    if kind != "fp32" and backend == "tensorrt" and version == "8.6":
        text = "must be fp32 for TensorRT 8.6, whose parser reads no Q/DQ of half precision"
        yield Wrong(text, "Build the engine of the fp32 file with --fp16", path=("HIGH_PRECISION",), value=kind)
    if kind != "fp32" and backend == "onnxruntime":
        text = "must be fp32 for the backend onnxruntime, whose CPU kernels for integers read and write float32 alone"
        hint = "BACKEND: tensorrt and BACKEND: virtual take fp16 and bf16"
        yield Wrong(text, hint, path=("HIGH_PRECISION",), value=kind)


def complete(data: dict[str, Any]) -> dict[str, Any]:
    """Fill in the backend's QSCHEME, BIT and OBSERVER.TYPE if `data` lacks them."""
    backend = data.get("BACKEND", "virtual")
    if not isinstance(backend, str) or backend.lower() not in LIMITS:  # invalid: reported by validation
        return data
    out = dict(data)
    for side, limits in sides(backend.lower(), str(data.get("MODE", STATIC)).lower()).items():
        given = out.get(side, {})
        if isinstance(given, dict):
            out[side] = {"QSCHEME": symmetric_for(given, limits.default_scheme), **given}
            quantizer = given.get("QUANTIZER", {})
            if isinstance(quantizer, dict):
                out[side]["QUANTIZER"] = {"BIT": limits.default_bits, **quantizer}
            observer = given.get("OBSERVER", {})
            if isinstance(observer, dict):
                out[side]["OBSERVER"] = {"TYPE": limits.default_observer, **observer}
    return out


def _in(mode: str) -> str:
    return "" if mode == STATIC else f" with MODE: {mode}"


def _bits_text(bits: tuple[int, ...]) -> str:
    """Format widths as ``2 to 8 or 16``: each run by its ends."""
    runs: list[list[int]] = []
    for width in bits:
        if runs and width == runs[-1][-1] + 1:
            runs[-1].append(width)
        else:
            runs.append([width])
    return one_of([f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs])


def check_bits(backend: str, side: str, path: Path, bits: int, mode: str = STATIC) -> Iterator[Wrong]:
    """Check that the backend supports a bit width in this mode."""
    allowed = sides(backend, mode)[side].bits
    if bits != FLOAT and bits not in allowed:
        hint = _width_hint(backend, side, bits, mode)
        text = f"must be {_bits_text(allowed)} for the backend {backend}{_in(mode)} (or 0 for float)"
        yield Wrong(text, hint, path=path, value=bits)


def _width_hint(backend: str, side: str, bits: int, mode: str) -> str:
    """Suggest a mode or backend that supports the bit width."""
    modes = [name for (owner, name), both in MODE_LIMITS.items() if owner == backend and bits in both[side].bits]
    if side == "W" and mode == STATIC and modes:
        return f"MODE: {modes[0]} takes it; BACKEND: virtual takes other widths"
    return "BACKEND: virtual takes other widths" if backend != "virtual" else ""


def check_scheme(backend: str, side: str, path: Path, scheme: str, mode: str = STATIC) -> Iterator[Wrong]:
    """Check that the backend supports a scheme in this mode."""
    allowed = sides(backend, mode)[side].schemes
    if scheme not in allowed:
        yield Wrong(f"must be {one_of(allowed)} for the backend {backend}{_in(mode)}", path=path, value=scheme)


def check_ends(backend: str, key: str, ends: SideBits, mode: str = STATIC) -> Iterator[Wrong]:
    """Check that the backend supports FIRST_BITS or LAST_BITS in this mode."""
    for side, bits in (("W", ends.w), ("A", ends.a)):
        if bits is not None:
            yield from check_bits(backend, side, (key, side), bits, mode)


def check_search(mode: str, *, auto: bool, mixed: bool) -> Iterator[Wrong]:
    """Check that this mode supports AUTO and MIXED."""
    if mode == "dynamic" and (auto or mixed):
        text = "must be static or weight_only with AUTO and MIXED"
        yield Wrong(text, "Scales that are computed as the model runs cannot be simulated", path=("MODE",), value=mode)
