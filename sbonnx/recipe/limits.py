"""What each backend accepts, in one table, and what holds when a recipe does not say."""

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
"""The width that means: not quantized. Every backend accepts it."""


@dataclass(frozen=True)
class SideLimits:
    """The widths and schemes that one side may have, and those it gets when nothing is said."""

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
        # at 4 bits a zero point a channel gains 0.6 to 1.7 dB, and costs nothing where it is taken into the codes
        "W": SideLimits(_BYTES, names.WEIGHT_SCHEMES, names.BY_WIDTH),
        "A": SideLimits((*_BYTES, 16), ("per-tensor-affine", "per-tensor-symmetric"), "per-tensor-affine"),
    },
    "tensorrt": {
        "W": SideLimits((4, 8), ("per-channel-symmetric", "per-tensor-symmetric"), "per-channel-symmetric"),
        "A": SideLimits((8,), ("per-tensor-symmetric",), "per-tensor-symmetric"),
    },
}


STATIC: Final = "static"
"""The mode that `LIMITS` speaks of."""

_PER_CHANNEL = ("per-channel-symmetric", "per-channel-affine")
_SYMMETRIC = ("per-channel-symmetric", "per-tensor-symmetric")
_UNUSED = SideLimits(_ANY_BITS, names.SCHEMES, "per-tensor-affine")

MODE_LIMITS: Final[dict[tuple[str, str], dict[str, SideLimits]]] = {
    # unsigned weights (affine ones) run no faster than float
    ("onnxruntime", "dynamic"): {
        "W": SideLimits((8,), _SYMMETRIC, "per-channel-symmetric"),
        "A": SideLimits((8,), ("per-tensor-affine",), "per-tensor-affine"),
    },
    # at 4 bits a zero point gains 0.9 dB and the range of least error another 0.3, for an eighth of a bit a weight
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
"""The same for the other modes; what is not here the backend does not have. Activations of weight_only stay float,
so nothing that is said of them can be wrong."""


def sides(backend: str, mode: str) -> dict[str, SideLimits]:
    """What both sides may have: for a mode that the backend does not have (which is refused), as in static."""
    return MODE_LIMITS.get((backend, mode), LIMITS[backend])


def check_mode(backend: str, mode: str, form: str, weights: str) -> Iterator[Wrong]:
    """Why a mode, a form of the file or a form of its weights is not possible on this backend."""
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
    """The recipe that is used when none is given, in the keys of the YAML.

    For a runtime, activations get the range of least squared error: on trained models it is nearer to float than
    min-max on both runtimes (docs/results.md). A recipe that does not say has the ancestor's min-max.
    """
    found: dict[str, Any] = {"BACKEND": backend, "SCHEDULE": {"FUSE_BN": True}}
    if backend.partition("@")[0] != "virtual":
        found["A"] = {"OBSERVER": {"TYPE": "mse"}}
    return found


def check_precision(backend: str, version: str | None, kind: str) -> Iterator[Wrong]:
    """Why the rest of the graph cannot be of this type on this backend."""
    if kind != "fp32" and backend == "tensorrt" and version == "8.6":
        text = "must be fp32 for TensorRT 8.6, whose parser reads no Q/DQ of half precision"
        yield Wrong(text, "Build the engine of the fp32 file with --fp16", path=("HIGH_PRECISION",), value=kind)
    if kind != "fp32" and backend == "onnxruntime":
        text = "must be fp32 for the backend onnxruntime, whose CPU kernels for integers read and write float32 alone"
        hint = "BACKEND: tensorrt and BACKEND: virtual take fp16 and bf16"
        yield Wrong(text, hint, path=("HIGH_PRECISION",), value=kind)


def complete(data: dict[str, Any]) -> dict[str, Any]:
    """`data` with the backend's QSCHEME and BIT where it does not say."""
    backend = data.get("BACKEND", "virtual")
    if not isinstance(backend, str) or backend.lower() not in LIMITS:  # it is wrong, and will be found so
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
    """``2 to 8 or 16``: runs of widths by their ends."""
    runs: list[list[int]] = []
    for width in bits:
        if runs and width == runs[-1][-1] + 1:
            runs[-1].append(width)
        else:
            runs.append([width])
    return one_of([f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs])


def check_bits(backend: str, side: str, path: Path, bits: int, mode: str = STATIC) -> Iterator[Wrong]:
    """Why a width is not possible on this backend in this mode."""
    allowed = sides(backend, mode)[side].bits
    if bits != FLOAT and bits not in allowed:
        hint = _width_hint(backend, side, bits, mode)
        text = f"must be {_bits_text(allowed)} for the backend {backend}{_in(mode)} (or 0 for float)"
        yield Wrong(text, hint, path=path, value=bits)


def _width_hint(backend: str, side: str, bits: int, mode: str) -> str:
    """Who takes a width that this backend does not take in this mode."""
    modes = [name for (owner, name), both in MODE_LIMITS.items() if owner == backend and bits in both[side].bits]
    if side == "W" and mode == STATIC and modes:
        return f"MODE: {modes[0]} takes it; BACKEND: virtual takes other widths"
    return "BACKEND: virtual takes other widths" if backend != "virtual" else ""


def check_scheme(backend: str, side: str, path: Path, scheme: str, mode: str = STATIC) -> Iterator[Wrong]:
    """Why a scheme is not possible on this backend in this mode."""
    allowed = sides(backend, mode)[side].schemes
    if scheme not in allowed:
        yield Wrong(f"must be {one_of(allowed)} for the backend {backend}{_in(mode)}", path=path, value=scheme)


def check_ends(backend: str, key: str, ends: SideBits, mode: str = STATIC) -> Iterator[Wrong]:
    """Why FIRST_BITS or LAST_BITS is not possible on this backend in this mode."""
    for side, bits in (("W", ends.w), ("A", ends.a)):
        if bits is not None:
            yield from check_bits(backend, side, (key, side), bits, mode)


def check_search(mode: str, *, auto: bool, mixed: bool) -> Iterator[Wrong]:
    """Why nothing can be tried in this mode."""
    if mode == "dynamic" and (auto or mixed):
        text = "must be static or weight_only with AUTO and MIXED"
        yield Wrong(text, "Scales that are computed as the model runs cannot be simulated", path=("MODE",), value=mode)
