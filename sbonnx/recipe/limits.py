"""What each backend accepts, in one table, and what holds when a recipe does not say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from sbonnx.recipe import names
from sbonnx.recipe.problem import Path, Wrong, one_of
from sbonnx.recipe.sections import SideBits
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


_ANY_BITS = tuple(range(MIN_BITS, MAX_BITS + 1))

LIMITS: Final[dict[str, dict[str, SideLimits]]] = {
    "virtual": {
        "W": SideLimits(_ANY_BITS, names.SCHEMES, "per-channel-symmetric"),
        "A": SideLimits(_ANY_BITS, names.SCHEMES, "per-tensor-affine"),
    },
    "onnxruntime": {
        "W": SideLimits((8,), names.SCHEMES, "per-channel-symmetric"),
        "A": SideLimits((8,), ("per-tensor-affine", "per-tensor-symmetric"), "per-tensor-affine"),
    },
    "tensorrt": {
        "W": SideLimits((8,), ("per-channel-symmetric", "per-tensor-symmetric"), "per-channel-symmetric"),
        "A": SideLimits((8,), ("per-tensor-symmetric",), "per-tensor-symmetric"),
    },
}


def defaults(backend: str) -> dict[str, Any]:
    """The recipe that is used when none is given, in the keys of the YAML."""
    return {"BACKEND": backend, "SCHEDULE": {"FUSE_BN": True}}


def complete(data: dict[str, Any]) -> dict[str, Any]:
    """`data` with the backend's QSCHEME and BIT where it does not say."""
    backend = data.get("BACKEND", "virtual")
    sides = LIMITS.get(backend.lower()) if isinstance(backend, str) else None
    if sides is None:  # the BACKEND itself is wrong, and will be found so
        return data
    out = dict(data)
    for side, limits in sides.items():
        given = out.get(side, {})
        if isinstance(given, dict):
            out[side] = {"QSCHEME": limits.default_scheme, **given}
            quantizer = given.get("QUANTIZER", {})
            if isinstance(quantizer, dict):
                out[side]["QUANTIZER"] = {"BIT": limits.default_bits, **quantizer}
    return out


def _bits_text(bits: tuple[int, ...]) -> str:
    return f"{bits[0]} to {bits[-1]}" if len(bits) > 2 else one_of(map(str, bits))


def check_bits(backend: str, side: str, path: Path, bits: int) -> Iterator[Wrong]:
    """Why a width is not possible on this backend."""
    allowed = LIMITS[backend][side].bits
    if bits != FLOAT and bits not in allowed:
        hint = "BACKEND: virtual takes other widths" if backend != "virtual" else ""
        text = f"must be {_bits_text(allowed)} for the backend {backend} (or 0 for float)"
        yield Wrong(text, hint, path=path, value=bits)


def check_scheme(backend: str, side: str, path: Path, scheme: str) -> Iterator[Wrong]:
    """Why a scheme is not possible on this backend."""
    allowed = LIMITS[backend][side].schemes
    if scheme not in allowed:
        yield Wrong(f"must be {one_of(allowed)} for the backend {backend}", path=path, value=scheme)


def check_ends(backend: str, key: str, ends: SideBits) -> Iterator[Wrong]:
    """Why FIRST_BITS or LAST_BITS is not possible on this backend."""
    for side, bits in (("W", ends.w), ("A", ends.a)):
        if bits is not None:
            yield from check_bits(backend, side, (key, side), bits)
