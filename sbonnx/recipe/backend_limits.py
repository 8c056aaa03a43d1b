"""Limits of each backend, and checks of what a recipe requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from sbonnx.backends.tensorrt.profiles import INT4_BITS, INT4_BLOCKS, PROFILES, VERSIONS, Version
from sbonnx.recipe import names
from sbonnx.recipe.defaults import TENSORRT
from sbonnx.recipe.names import FLOAT, STATIC, is_per_channel
from sbonnx.recipe.problem import Path, Wrong, one_of
from sbonnx.recipe.resolve import Part
from sbonnx.recipe.sections.quantizers import SideBits
from sbonnx.recipe.value_types import MAX_BITS, MIN_BITS
from sbonnx.spec import FP8, FP8_BITS


@dataclass(frozen=True)
class SideLimits:
    """Allowed bit widths and schemes of one side (weights or activations)."""

    bits: tuple[int, ...]
    schemes: tuple[str, ...]


_ANY_BITS = tuple(range(MIN_BITS, MAX_BITS + 1))
_BYTES = tuple(range(MIN_BITS, 8 + 1))

_PER_CHANNEL = ("per-channel-symmetric", "per-channel-affine")
_SYMMETRIC = ("per-channel-symmetric", "per-tensor-symmetric")
_ANY = SideLimits(_ANY_BITS, names.SCHEMES)

LIMITS: Final[dict[str, dict[str, SideLimits]]] = {
    "virtual": {"W": _ANY, "A": _ANY},
    "onnxruntime": {
        "W": SideLimits(_BYTES, names.WEIGHT_SCHEMES),
        "A": SideLimits((*_BYTES, 16), ("per-tensor-affine", "per-tensor-symmetric")),
    },
    "openvino": {
        "W": SideLimits(_BYTES, _SYMMETRIC),
        "A": SideLimits((8,), ("per-tensor-affine", "per-tensor-symmetric")),
    },
    "qnn": {
        "W": SideLimits((8,), (*_SYMMETRIC, "per-tensor-affine", names.BY_WIDTH)),
        "A": SideLimits((8, 16), ("per-tensor-affine", "per-tensor-symmetric")),
    },
    "tensorrt": {
        "W": SideLimits((4, 8), _SYMMETRIC),
        "A": SideLimits((8,), ("per-tensor-symmetric",)),
    },
}

BY_CHANNEL: Final = frozenset({"onnxruntime", "openvino", "qnn"})
"""Backends whose integer kernels read and write float32 at most, with one scale per channel of a weight."""

WITH_OUTPUT_PAIRS: Final = frozenset({"qnn"})
"""Backends of `LIMITS` that have pairs at outputs of the graph."""

MODE_LIMITS: Final[dict[tuple[str, str], dict[str, SideLimits]]] = {
    # unsigned weights (affine ones) run no faster than float
    ("onnxruntime", "dynamic"): {"W": SideLimits((8,), _SYMMETRIC), "A": SideLimits((8,), ("per-tensor-affine",))},
    ("onnxruntime", "weight_only"): {"W": SideLimits(_BYTES, _PER_CHANNEL), "A": _ANY},
    ("openvino", "weight_only"): {"W": SideLimits((4, 8), _PER_CHANNEL), "A": _ANY},
    ("tensorrt", "weight_only"): {"W": SideLimits((4,), ("per-channel-symmetric",)), "A": _ANY},
    ("virtual", "weight_only"): {"W": _ANY, "A": _ANY},
}
"""Limits of the modes other than static; the backend does not support a mode that is missing here. Activations of
weight_only stay float, so that none of their settings can be invalid."""


def sides(backend: str, mode: str) -> dict[str, SideLimits]:
    """Return the limits of both sides; those of static if the backend lacks the mode (which is refused elsewhere).

    A backend without a row has the limits of "virtual".
    """
    return MODE_LIMITS.get((backend, mode)) or LIMITS.get(backend, LIMITS["virtual"])


def _bits_text(bits: tuple[int, ...]) -> str:
    """Format widths as ``2 to 8 or 16``: each run by its ends."""
    runs: list[list[int]] = []
    for width in bits:
        if runs and width == runs[-1][-1] + 1:
            runs[-1].append(width)
        else:
            runs.append([width])
    return one_of([f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs])


@dataclass(frozen=True)
class BackendLimits:
    """Checks against one backend in one mode.

    Attributes:
        backend, mode: of the recipe.
        version: of the backend; None if it has no versions.
    """

    backend: str
    mode: str
    version: Version | None

    @property
    def _suffix(self) -> str:
        """End of a message: the mode, unless it is static."""
        return "" if self.mode == STATIC else f" with MODE: {self.mode}"

    def mode_problems(self, form: str, weights: str) -> Iterator[Wrong]:
        """Check that the backend supports the mode, a file format and a form of the weights."""
        backend, mode = self.backend, self.mode
        if mode != STATIC and (backend, mode) not in MODE_LIMITS:
            modes = [STATIC, *(name for owner, name in MODE_LIMITS if owner == backend)]
            hint = "only onnxruntime has kernels that compute the scales of activations as the model runs"
            yield Wrong(f"must be {one_of(modes)} for the backend {backend}", hint, path=("MODE",), value=mode)
        if form == "qoperator" and backend != "onnxruntime":
            hint = "QLinearConv and similar operators are onnxruntime's"
            yield Wrong(f"must be qdq for the backend {backend}", hint, path=("FORMAT",), value=form)
        elif form == "qoperator" and mode != STATIC:
            hint = "It already has integer operators"
            yield Wrong(f"must be qdq with MODE: {mode}", hint, path=("FORMAT",), value=form)
        if weights == "qdq" and backend == "onnxruntime" and (mode, form) != (STATIC, "qdq"):
            what = f"MODE: {mode}" if mode != STATIC else f"FORMAT: {form}"
            hint = "Integer operators read codes"
            yield Wrong(f"must be codes with {what}", hint, path=("WEIGHTS",), value=weights)

    def search_problems(self, *, auto: bool, mixed: bool) -> Iterator[Wrong]:
        """Check that the mode supports AUTO and MIXED."""
        if self.mode == "dynamic" and (auto or mixed):
            text = "must be static or weight_only with AUTO and MIXED"
            hint = "Scales that are computed as the model runs cannot be simulated"
            yield Wrong(text, hint, path=("MODE",), value=self.mode)

    def precision_problems(self, kind: str) -> Iterator[Wrong]:
        """Check that the backend supports this type for the float part of the graph."""
        if kind != "fp32" and self.backend == TENSORRT and self.version == "8.6":
            text = "must be fp32 for TensorRT 8.6, whose parser reads no Q/DQ of half precision"
            yield Wrong(text, "Build the engine of the fp32 file with --fp16", path=("HIGH_PRECISION",), value=kind)
        if kind != "fp32" and self.backend in BY_CHANNEL:
            text = f"must be fp32 for the backend {self.backend}, whose integer kernels read and write only float32"
            hint = "BACKEND: tensorrt and BACKEND: virtual support fp16 and bf16"
            yield Wrong(text, hint, path=("HIGH_PRECISION",), value=kind)

    def override_problems(self, path: str | None) -> Iterator[Wrong]:
        """Check that the backend has overrides of single tensors."""
        if path is not None and self.backend != "qnn":
            hint = "W.SPECIFIC, A.SPECIFIC and RANGES do the same for other backends"
            yield Wrong("is for the backend qnn", hint, path=("TENSOR_OVERRIDES",), value=path)

    def graph_end_problems(self, ends: str | None) -> Iterator[Wrong]:
        """Check that the backend has pairs at outputs of the graph. Backends of plug-ins may have them."""
        if ends in ("both", "outputs") and self.backend in LIMITS.keys() - WITH_OUTPUT_PAIRS:
            text = f"must be inputs or none for all backends but {one_of(sorted(WITH_OUTPUT_PAIRS))}"
            yield Wrong(text, "Kernels of other runtimes write float outputs", path=("QUANTIZE_IO",), value=ends)

    def bits_problems(self, side: str, path: Path, bits: int) -> Iterator[Wrong]:
        """Check that the backend supports a bit width in this mode."""
        allowed = sides(self.backend, self.mode)[side].bits
        if bits == FLOAT or bits in allowed:
            return
        others = {mode: both[side].bits for (owner, mode), both in MODE_LIMITS.items() if owner == self.backend}
        modes = [mode for mode, widths in others.items() if bits in widths]
        hint = "BACKEND: virtual supports other widths" if self.backend != "virtual" else ""
        if side == "W" and self.mode == STATIC and modes:
            hint = f"MODE: {modes[0]} supports it; BACKEND: virtual supports other widths"
        text = f"must be {_bits_text(allowed)} for the backend {self.backend}{self._suffix} (or 0 for float)"
        yield Wrong(text, hint, path=path, value=bits)

    def part_problems(self, part: Part) -> Iterator[Wrong]:
        """Check the bit width and the scheme of a part."""
        if part.is_float:
            return
        yield from self.bits_problems(part.side, (*part.path, "QUANTIZER", "BIT"), part.keys.quantizer.bit)
        allowed, scheme = sides(self.backend, self.mode)[part.side].schemes, part.keys.qscheme
        if scheme not in allowed:
            text = f"must be {one_of(allowed)} for the backend {self.backend}{self._suffix}"
            hint = "BACKEND: virtual supports it" if scheme in sides("virtual", self.mode)[part.side].schemes else ""
            yield Wrong(text, hint, path=(*part.path, "QSCHEME"), value=scheme)

    def ends_problems(self, key: str, ends: SideBits) -> Iterator[Wrong]:
        """Check that the backend supports FIRST_BITS or LAST_BITS in this mode."""
        for side, bits in (("W", ends.w), ("A", ends.a)):
            if bits is not None:
                yield from self.bits_problems(side, (key, side), bits)

    def type_problems(self, parts: Sequence[Part], ends: dict[str, SideBits]) -> Iterator[Wrong]:
        """Check the quantized types of all parts, and those of FIRST_BITS and LAST_BITS: fp8, 4 bits, blocks."""
        if self.version is not None and self.backend != TENSORRT:
            yield Wrong(f"is for the backend {TENSORRT} only", path=("VERSION",), value=self.version)
            return
        if self.version is not None and self.mode == "weight_only" and not self._has("int4"):
            yield self._lacks("int4", ("MODE",), self.mode)
            return
        inputs = next(part for part in parts if part.side == "A" and not part.pattern)
        for part in parts:
            if not part.is_float:
                yield from self._fp8_problems(part)
                yield from self._block_problems(part)
                yield from self._int4_problems(part, float_inputs=inputs.is_float)
        for key, bits in ends.items():
            if bits.w == INT4_BITS and self.version is not None and not self._has("int4"):
                yield self._lacks("int4", (key, "W"), bits.w)
        dtypes = [None if side.is_float else side.keys.quantizer.dtype for side in parts if not side.pattern]
        if self.backend == TENSORRT and None not in dtypes and len(set(dtypes)) > 1:
            path: Path = ("W" if dtypes[0] == "fp8" else "A", "QUANTIZER", "DTYPE")
            yield Wrong("must be fp8 on both sides or on none for the backend tensorrt", path=path, value="fp8")

    def _has(self, codes: str) -> bool:
        return self.version is not None and codes in PROFILES[self.version].codes

    def _lacks(self, codes: str, path: Path, value: object) -> Wrong:
        """Return the problem that the version of TensorRT lacks a quantized type."""
        newer = [f"tensorrt@{version}" for version in VERSIONS if codes in PROFILES[version].codes]
        name = "fp8" if codes == FP8 else codes
        text = f"requires {name}, which TensorRT {self.version} does not have"
        return Wrong(text, f"Choose BACKEND {one_of(newer)}, or 8 bits", path=path, value=value)

    def _fp8_problems(self, part: Part) -> Iterator[Wrong]:
        """Check fp8: supported by the backend, symmetric, 8 bits, with a suitable observer."""
        quantizer, observer = part.keys.quantizer, part.keys.observer.type
        if quantizer.dtype != "fp8":
            return
        path = (*part.path, "QUANTIZER", "DTYPE")
        if self.backend not in (TENSORRT, "virtual") or self.mode != STATIC:
            hint = "onnxruntime's CPU has no kernels that compute on fp8" if self.backend == "onnxruntime" else ""
            yield Wrong("is for the backends tensorrt and virtual, with MODE: static", hint, path=path, value="fp8")
        elif self.backend == TENSORRT and not self._has(FP8):
            yield self._lacks(FP8, path, "fp8")
        elif quantizer.bit != FP8_BITS:
            yield Wrong("must be 8 (or 0 for float) with DTYPE: fp8", path=(*path[:-1], "BIT"), value=quantizer.bit)
        elif not part.keys.qscheme.endswith("-symmetric"):
            text = "must be symmetric with DTYPE: fp8, which has no zero point"
            yield Wrong(text, path=(*part.path, "QSCHEME"), value=part.keys.qscheme)
        elif observer in names.ONLY_INTEGERS:
            text = f"is for integers with uniform steps; use {one_of(('minmax', 'mse', 'percentile'))} with DTYPE: fp8"
            yield Wrong(text, path=(*part.path, "OBSERVER", "TYPE"), value=observer)

    def _block_problems(self, part: Part) -> Iterator[Wrong]:
        size = part.settings.block_size
        if size is None:
            return
        path = (*part.path, "BLOCK_SIZE")
        if self.backend in BY_CHANNEL and self.mode != "weight_only":
            text = f"is for MODE: weight_only on {self.backend}, whose integer kernels have one scale per channel"
            yield Wrong(text, "Use none", path=path, value=size)
        elif self.backend == TENSORRT and part.keys.quantizer.bit != INT4_BITS:
            yield Wrong("is for weights of 4 bits on tensorrt: use none, or BIT: 4", path=path, value=size)
        elif self.backend == TENSORRT and size not in INT4_BLOCKS:
            yield Wrong(f"must be {one_of(map(str, INT4_BLOCKS))} for the backend tensorrt", path=path, value=size)
        elif not is_per_channel(part.keys.qscheme):
            text = "must be per-channel-symmetric or per-channel-affine with BLOCK_SIZE"
            yield Wrong(text, path=(*part.path, "QSCHEME"), value=part.keys.qscheme)

    def _int4_problems(self, part: Part, *, float_inputs: bool) -> Iterator[Wrong]:
        """Check 4-bit weights of TensorRT, which need float inputs."""
        bit = part.keys.quantizer.bit
        if self.backend != TENSORRT or part.side != "W" or bit != INT4_BITS:
            return
        path = (*part.path, "QUANTIZER", "BIT")
        if not self._has("int4"):
            yield self._lacks("int4", path, bit)
        elif self.mode == STATIC and not part.pattern and not float_inputs:
            hint = "Leave activations float (bits: w4a0), choose MODE: weight_only, or set 4 bits in W.SPECIFIC"
            yield Wrong("is for weights only on tensorrt", hint, path=path, value=bit)
