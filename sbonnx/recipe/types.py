"""Checks of the quantized types that a recipe requests: fp8, 4 bits, blocks, and limits of TensorRT versions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from sbonnx.backends.tensorrt.profiles import INT4_BITS, INT4_BLOCKS, PROFILES, VERSIONS
from sbonnx.recipe import names
from sbonnx.recipe.problem import Path, Wrong, one_of
from sbonnx.recipe.schemes import is_per_channel
from sbonnx.spec import FP8, FP8_BITS

if TYPE_CHECKING:
    from sbonnx.recipe.resolve import Part
    from sbonnx.recipe.schema import Recipe

TENSORRT: Final = "tensorrt"


def one_version(data: dict[str, Any]) -> dict[str, Any]:
    """Split ``BACKEND: tensorrt@10`` into BACKEND and VERSION; a recipe for TensorRT without one gets the newest.

    Raises:
        Wrong: both are given and differ.
    """
    backend, given = data.get("BACKEND"), data.get("VERSION")
    if not isinstance(backend, str):
        return data
    name, at, version = backend.partition("@")
    if name.lower() != TENSORRT or (at and version not in VERSIONS):
        return data  # invalid names are reported by validation
    if not at:
        return {**data, "VERSION": VERSIONS[0] if given is None else given}
    if given is not None and str(given).removesuffix(".0") != version:
        raise Wrong(f"contradicts BACKEND: {backend}: drop one", path=("VERSION",), value=given)
    return {**data, "BACKEND": name, "VERSION": version}


def symmetric_for(side: Any, scheme: str) -> str:
    """Return the default scheme of a side: the symmetric form of `scheme` if its quantized type is fp8."""
    quantizer = side.get("QUANTIZER") if isinstance(side, dict) else None
    dtype = quantizer.get("DTYPE") if isinstance(quantizer, dict) else None
    return scheme.replace("-affine", "-symmetric") if str(dtype).lower() == "fp8" else scheme


def problems(recipe: Recipe, parts: Sequence[Part]) -> Iterator[Wrong]:
    """Yield the settings in these parts and the other keys that the backend, in its version, does not support."""
    if recipe.version is not None and recipe.backend != TENSORRT:
        yield Wrong(f"is for the backend {TENSORRT} only", path=("VERSION",), value=recipe.version)
        return
    if recipe.version is not None and recipe.mode == "weight_only" and not _has("int4", recipe):
        yield Wrong(_lacks("int4", recipe), _newer("int4"), path=("MODE",), value=recipe.mode)
        return
    inputs = next(part for part in parts if part.side == "A" and not part.pattern)
    for part in parts:
        if not part.is_float:
            yield from _fp8(part, recipe)
            yield from _blocks(part, recipe)
            yield from _int4(part, recipe, floats=inputs.is_float)
    for key, ends in (("FIRST_BITS", recipe.first_bits), ("LAST_BITS", recipe.last_bits)):
        if ends.w == INT4_BITS and recipe.version is not None and not _has("int4", recipe):
            yield Wrong(_lacks("int4", recipe), _newer("int4"), path=(key, "W"), value=ends.w)
    dtypes = [None if side.is_float else side.keys.quantizer.dtype for side in parts if not side.pattern]
    if recipe.backend == TENSORRT and None not in dtypes and len(set(dtypes)) > 1:
        path: Path = ("W" if dtypes[0] == "fp8" else "A", "QUANTIZER", "DTYPE")
        yield Wrong("must be fp8 on both sides or on none for the backend tensorrt", path=path, value="fp8")


def _has(codes: str, recipe: Recipe) -> bool:
    return recipe.version is not None and codes in PROFILES[recipe.version].codes


def _lacks(codes: str, recipe: Recipe) -> str:
    return f"asks for {codes}, which TensorRT {recipe.version} does not have"


def _newer(codes: str) -> str:
    has = [f"tensorrt@{version}" for version in VERSIONS if codes in PROFILES[version].codes]
    return f"Choose BACKEND {one_of(has)}, or 8 bits"


def _fp8(part: Part, recipe: Recipe) -> Iterator[Wrong]:
    """Check fp8: supported by the backend, symmetric, 8 bits, with a suitable observer."""
    quantizer, observer = part.keys.quantizer, part.keys.observer.type
    if quantizer.dtype != "fp8":
        return
    path = (*part.path, "QUANTIZER", "DTYPE")
    if recipe.backend not in (TENSORRT, "virtual") or recipe.mode != "static":
        hint = "onnxruntime's CPU has no kernels that compute on fp8" if recipe.backend == "onnxruntime" else ""
        yield Wrong("is for the backends tensorrt and virtual, with MODE: static", hint, path=path, value="fp8")
    elif recipe.backend == TENSORRT and not _has(FP8, recipe):
        yield Wrong(_lacks("fp8", recipe), _newer(FP8), path=path, value="fp8")
    elif quantizer.bit != FP8_BITS:
        yield Wrong("must be 8 (or 0 for float) with DTYPE: fp8", path=(*path[:-1], "BIT"), value=quantizer.bit)
    elif not part.keys.qscheme.endswith("-symmetric"):
        text = "must be symmetric with DTYPE: fp8, which has no zero point"
        yield Wrong(text, path=(*part.path, "QSCHEME"), value=part.keys.qscheme)
    elif observer in names.ONLY_INTEGERS:
        text = f"is for integers, whose steps are even; use {one_of(('minmax', 'mse', 'percentile'))} with DTYPE: fp8"
        yield Wrong(text, path=(*part.path, "OBSERVER", "TYPE"), value=observer)


def _blocks(part: Part, recipe: Recipe) -> Iterator[Wrong]:
    """Check that the backend's kernels support block-wise scales."""
    size = part.settings.block_size
    if size is None:
        return
    path = (*part.path, "BLOCK_SIZE")
    if recipe.backend == "onnxruntime" and recipe.mode != "weight_only":
        text = "is for MODE: weight_only on onnxruntime, whose integer kernels take one scale a channel"
        yield Wrong(text, "Use none", path=path, value=size)
    elif recipe.backend == TENSORRT and part.keys.quantizer.bit != INT4_BITS:
        yield Wrong("is for weights of 4 bits on tensorrt: use none, or BIT: 4", path=path, value=size)
    elif recipe.backend == TENSORRT and size not in INT4_BLOCKS:
        yield Wrong(f"must be {one_of(map(str, INT4_BLOCKS))} for the backend tensorrt", path=path, value=size)
    elif not is_per_channel(part.keys.qscheme):
        text = "must be per-channel-symmetric or per-channel-affine with BLOCK_SIZE"
        yield Wrong(text, path=(*part.path, "QSCHEME"), value=part.keys.qscheme)


def _int4(part: Part, recipe: Recipe, *, floats: bool) -> Iterator[Wrong]:
    """Check 4-bit weights of TensorRT, which need float inputs: `floats` says that all inputs are float."""
    bit = part.keys.quantizer.bit
    if recipe.backend != TENSORRT or part.side != "W" or bit != INT4_BITS:
        return
    path = (*part.path, "QUANTIZER", "BIT")
    if not _has("int4", recipe):
        yield Wrong(_lacks("int4", recipe), _newer("int4"), path=path, value=bit)
    elif recipe.mode == "static" and not part.pattern and not floats:
        hint = "Leave activations float (bits: w4a0), choose MODE: weight_only, or ask for 4 bits in W.SPECIFIC"
        yield Wrong("is for weights alone on tensorrt", hint, path=path, value=bit)
