"""Limits of each backend: checks of what a recipe requests, and their text for documentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sbonnx.backends import BACKENDS, Backend
from sbonnx.backends.mode_limits import ANY_BITS, SCHEMES, STATIC, WEIGHT_SCHEMES, SideLimits
from sbonnx.backends.tensorrt.profiles import INT4_BITS, PROFILES
from sbonnx.backends.virtual import VIRTUAL
from sbonnx.recipe import names
from sbonnx.recipe.names import FLOAT, FULL_BITS, is_per_channel
from sbonnx.recipe.problem import Path, Wrong, one_of
from sbonnx.recipe.resolve import Part
from sbonnx.recipe.sections.quantizers import SideBits
from sbonnx.schemes import VERSIONS, Version
from sbonnx.small_floats import FLOATS, FP4, FP8, IN_BLOCKS, Kind
from sbonnx.spec import QuantSpec

INT4: Final = QuantSpec(bits=INT4_BITS)


def sides(backend: Backend, mode: str) -> dict[str, SideLimits]:
    """Return the limits of both sides; those of static if the backend lacks the mode (which is refused elsewhere)."""
    return backend.modes.get(mode, backend.modes[STATIC]).sides


def _backends(fits: Callable[[Backend], bool], prefix: str = "") -> str:
    """Return the names of the backends for which a condition is true, as a text."""
    return " and ".join(f"{prefix}{name}" for name, other in sorted(BACKENDS.usable().items()) if fits(other))


def _runs(bits: Iterable[int]) -> list[str]:
    """Format widths as ``2 to 8``, ``16``: each run by its ends."""
    ends: list[list[int]] = []
    for width in bits:
        if ends and width == ends[-1][-1] + 1:
            ends[-1].append(width)
        else:
            ends.append([width])
    return [f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in ends]


@dataclass(frozen=True)
class BackendLimits:
    """Checks against one backend in one mode.

    Attributes:
        backend, mode: of the recipe.
        version: that the recipe names, or None.
    """

    backend: Backend
    mode: str
    version: Version | None

    @property
    def _suffix(self) -> str:
        """End of a message: the mode, unless it is static."""
        return "" if self.mode == STATIC else f" with MODE: {self.mode}"

    def mode_problems(self, form: str, weights: str) -> Iterator[Wrong]:
        """Check that the backend supports the mode, a file format and a form of the weights."""
        name, mode, operators = self.backend.name, self.mode, self.backend.files.integer_operators
        if mode not in self.backend.modes:
            hint = "only onnxruntime has kernels that compute the scales of activations as the model runs"
            text = f"must be {one_of(self.backend.modes)} for the backend {name}"
            yield Wrong(text, hint if mode == "dynamic" else "", path=("MODE",), value=mode)
        if form == "qoperator" and not operators:
            hint = "QLinearConv and similar operators are onnxruntime's"
            yield Wrong(f"must be qdq for the backend {name}", hint, path=("FORMAT",), value=form)
        elif form == "qoperator" and mode != STATIC:
            hint = "It already has integer operators"
            yield Wrong(f"must be qdq with MODE: {mode}", hint, path=("FORMAT",), value=form)
        if weights == "qdq" and operators and (mode, form) != (STATIC, "qdq"):
            what = f"MODE: {mode}" if mode != STATIC else f"FORMAT: {form}"
            hint = "Integer operators read codes"
            yield Wrong(f"must be codes with {what}", hint, path=("WEIGHTS",), value=weights)

    def search_problems(self, *, auto: bool, mixed: bool) -> Iterator[Wrong]:
        """Check that the mode supports AUTO and MIXED."""
        if self.mode == "dynamic" and (auto or mixed):
            text = "must be static or weight_only with AUTO and MIXED"
            hint = "Scales that are computed as the model runs cannot be simulated"
            yield Wrong(text, hint, path=("MODE",), value=self.mode)

    def tuning_problems(self, goal: str, float_nodes: Sequence[str] | None) -> Iterator[Wrong]:
        """Check that the files of the backend run here for TUNE, and that FLOAT_NODES is for static quantization."""
        if goal != "none" and not self.backend.times_files:
            names_of = _backends(lambda other: other.times_files)
            text = f"must be none with the backend {self.backend.name}: files are measured here for {names_of}"
            yield Wrong(text, path=("TUNE", "GOAL"), value=goal)
        if float_nodes is not None and self.mode != STATIC:
            text = "places integers of static quantization: drop it, or set MODE: static"
            yield Wrong(text, path=("FLOAT_NODES",), value=list(float_nodes))

    def precision_problems(self, kind: str, *, integers: bool) -> Iterator[Wrong]:
        """Check that the backend supports this type for the float part of the graph.

        Args:
            integers: weights or activations are quantized.
        """
        if kind != "fp32" and self.version is not None and not PROFILES[self.version].half_pairs:
            text = f"must be fp32 for {PROFILES[self.version].name}, whose parser reads no Q/DQ of half precision"
            yield Wrong(text, "Build the engine of the fp32 file with --fp16", path=("HIGH_PRECISION",), value=kind)
        numbers = self.backend.numbers
        if kind == "fp16" and numbers.half_blocks and (self.mode == "weight_only" or not integers):
            return
        if kind != "fp32" and numbers.only_channels:
            kernels = f"the backend {self.backend.name}, whose integer kernels read and write only float32"
            hint = f"{_backends(lambda other: not other.numbers.only_channels, 'BACKEND: ')} support fp16 and bf16"
            yield Wrong(f"must be fp32 for {kernels}", hint, path=("HIGH_PRECISION",), value=kind)

    def override_problems(self, path: str | None) -> Iterator[Wrong]:
        """Check that the backend has overrides of single tensors."""
        if path is not None and not self.backend.numbers.tensor_overrides:
            hint = "W.SPECIFIC, A.SPECIFIC and RANGES do the same for other backends"
            text = f"is for the backend {_backends(lambda other: other.numbers.tensor_overrides)}"
            yield Wrong(text, hint, path=("TENSOR_OVERRIDES",), value=path)

    def graph_end_problems(self, ends: str | None) -> Iterator[Wrong]:
        """Check that the backend has pairs at outputs of the graph."""
        if ends in ("both", "outputs") and not self.backend.placement.writes_outputs:
            others = _backends(lambda other: other.placement.writes_outputs)
            text = f"must be inputs or none for all backends but {others}"
            yield Wrong(text, "Kernels of other runtimes write float outputs", path=("QUANTIZE_IO",), value=ends)

    def bits_problems(self, side: str, path: Path, bits: int) -> Iterator[Wrong]:
        """Check that the backend supports a bit width in this mode."""
        allowed = sides(self.backend, self.mode)[side].bits
        if bits == FLOAT or bits in allowed:
            return
        modes = [mode for mode, limits in self.backend.modes.items() if bits in limits.sides[side].bits]
        hint = "" if self.backend.numbers.any_bits else "BACKEND: virtual supports other widths"
        if side == "W" and self.mode == STATIC and modes:
            hint = f"MODE: {modes[0]} supports it; BACKEND: virtual supports other widths"
        text = f"must be {one_of(_runs(allowed))} for the backend {self.backend.name}{self._suffix} (or 0 for float)"
        yield Wrong(text, hint, path=path, value=bits)

    def part_problems(self, part: Part) -> Iterator[Wrong]:
        """Check the bit width and the scheme of a part."""
        if part.is_float:
            return
        yield from self.bits_problems(part.side, (*part.path, "QUANTIZER", "BIT"), part.keys.quantizer.bit)
        allowed, scheme = sides(self.backend, self.mode)[part.side].schemes, part.keys.qscheme
        if scheme not in allowed:
            text = f"must be {one_of(allowed)} for the backend {self.backend.name}{self._suffix}"
            hint = "BACKEND: virtual supports it" if scheme in sides(VIRTUAL, self.mode)[part.side].schemes else ""
            yield Wrong(text, hint, path=(*part.path, "QSCHEME"), value=scheme)

    def ends_problems(self, key: str, ends: SideBits) -> Iterator[Wrong]:
        """Check that the backend supports FIRST_BITS or LAST_BITS in this mode."""
        for side, bits in (("W", ends.w), ("A", ends.a)):
            if bits is not None:
                yield from self.bits_problems(side, (key, side), bits)

    def type_problems(self, parts: Sequence[Part], ends: dict[str, SideBits]) -> Iterator[Wrong]:
        """Check the quantized types of all parts, and those of FIRST_BITS and LAST_BITS: fp8, 4 bits, blocks."""
        if self.version is not None and self.backend.files.version is None:
            owner = _backends(lambda other: other.files.version is not None)
            yield Wrong(f"is for the backend {owner} only", path=("VERSION",), value=self.version)
            return
        if self.version is not None and self.mode == "weight_only" and not self._has("int4"):
            yield self._lacks("int4", ("MODE",), self.mode)
            return
        inputs = next(part for part in parts if part.side == "A" and not part.pattern)
        for part in parts:
            if not part.is_float:
                yield from self._float_problems(part)
                yield from self._block_problems(part)
                yield from self._int4_problems(part, float_inputs=inputs.is_float)
        for key, bits in ends.items():
            if bits.w == INT4_BITS and self.version is not None and not self._has("int4"):
                yield self._lacks("int4", (key, "W"), bits.w)
        dtypes = [None if side.is_float else side.keys.quantizer.dtype for side in parts if not side.pattern]
        if self.backend.numbers.fp8 == "kernels" and None not in dtypes and len(set(dtypes)) > 1 and "fp8" in dtypes:
            path: Path = ("W" if dtypes[0] == "fp8" else "A", "QUANTIZER", "DTYPE")
            yield Wrong(
                f"must be fp8 on both sides or on none for the backend {self.backend.name}", path=path, value="fp8"
            )

    def _has(self, codes: str) -> bool:
        return self.version is not None and codes in PROFILES[self.version].codes

    def _lacks(self, codes: str, path: Path, value: object) -> Wrong:
        """Return the problem that the version of TensorRT lacks a quantized type."""
        newer = [f"tensorrt@{version}" for version in VERSIONS if codes in PROFILES[version].codes]
        name = {FP8: "fp8", FP4: "fp4"}.get(codes, codes)
        text = f"requires {name}, which TensorRT {self.version} does not have"
        return Wrong(text, f"Choose BACKEND {one_of(newer)}, or 8 bits", path=path, value=value)

    def _float_problems(self, part: Part) -> Iterator[Wrong]:
        """Check small floats: supported by the backend, symmetric, of their width, with a suitable observer."""
        quantizer, observer = part.keys.quantizer, part.keys.observer.type
        kind, float_kind = quantizer.dtype, FLOATS.get(quantizer.dtype)
        if float_kind is None:
            return
        path = (*part.path, "QUANTIZER", "DTYPE")
        mode = STATIC if float_kind.block is None else "weight_only"
        lacking = not _supports(self.backend, kind)
        if float_kind.block is not None and part.side == "A":
            yield Wrong("is for weights: scales of blocks of activations change with the data", path=path, value=kind)
        elif lacking or self.mode != mode:
            hint = f"{self.backend.name} has no kernels that compute on {kind}" if lacking else ""
            owners = _backends(lambda other: _supports(other, kind))
            yield Wrong(f"is for the backends {owners}, with MODE: {mode}", hint, path=path, value=kind)
        elif self.version is not None and not self._has(float_kind.codes):
            yield self._lacks(float_kind.codes, path, kind)
        elif quantizer.bit != float_kind.bits:
            text = f"must be {float_kind.bits} (or 0 for float) with DTYPE: {kind}"
            yield Wrong(text, path=(*path[:-1], "BIT"), value=quantizer.bit)
        elif not part.keys.qscheme.endswith("-symmetric"):
            text = f"must be symmetric with DTYPE: {kind}, which has no zero point"
            yield Wrong(text, path=(*part.path, "QSCHEME"), value=part.keys.qscheme)
        elif observer in names.ONLY_INTEGERS:
            text = (
                f"is for integers with uniform steps; use {one_of(('minmax', 'mse', 'percentile'))} with DTYPE: {kind}"
            )
            yield Wrong(text, path=(*part.path, "OBSERVER", "TYPE"), value=observer)

    def _block_problems(self, part: Part) -> Iterator[Wrong]:
        size = part.settings.block_size
        if size is None:
            return
        path = (*part.path, "BLOCK_SIZE")
        if part.keys.quantizer.dtype in IN_BLOCKS:
            if size != FLOATS[part.keys.quantizer.dtype].block:
                block = FLOATS[part.keys.quantizer.dtype].block
                yield Wrong(f"must be {block} with DTYPE: {part.keys.quantizer.dtype}", path=path, value=size)
            elif not is_per_channel(part.keys.qscheme):
                yield Wrong(
                    "must be per-channel-symmetric with blocks", path=(*part.path, "QSCHEME"), value=part.keys.qscheme
                )
            return
        sizes, name = self.backend.numbers.block_sizes(INT4), self.backend.name
        if self.backend.numbers.only_channels and self.mode != "weight_only":
            text = f"is for MODE: weight_only on {name}, whose integer kernels have one scale per channel"
            yield Wrong(text, "Use none", path=path, value=size)
        elif sizes and part.keys.quantizer.bit != INT4_BITS:
            yield Wrong(f"is for weights of 4 bits on {name}: use none, or BIT: 4", path=path, value=size)
        elif sizes and size not in sizes:
            yield Wrong(f"must be {one_of(map(str, sizes))} for the backend {name}", path=path, value=size)
        elif not is_per_channel(part.keys.qscheme):
            text = "must be per-channel-symmetric or per-channel-affine with BLOCK_SIZE"
            yield Wrong(text, path=(*part.path, "QSCHEME"), value=part.keys.qscheme)

    def _int4_problems(self, part: Part, *, float_inputs: bool) -> Iterator[Wrong]:
        """Check 4-bit weights of a backend where they need float inputs."""
        bit, integers = part.keys.quantizer.bit, part.keys.quantizer.dtype == "int"
        if not self.backend.numbers.block_sizes(INT4) or part.side != "W" or bit != INT4_BITS or not integers:
            return
        path = (*part.path, "QUANTIZER", "BIT")
        if self.version is not None and not self._has("int4"):
            yield self._lacks("int4", path, bit)
        elif self.mode == STATIC and not part.pattern and not float_inputs:
            hint = "Leave activations float (bits: w4a0), choose MODE: weight_only, or set 4 bits in W.SPECIFIC"
            yield Wrong(f"is for weights only on {self.backend.name}", hint, path=path, value=bit)


def _supports(backend: Backend, kind: Kind) -> bool:
    """Return whether a backend has a kind of small floats."""
    return backend.numbers.fp8 != "none" if kind == "fp8" else kind in backend.numbers.block_floats


def _widths(backend: Backend, side: str, mode: str = STATIC) -> str:
    """Format the widths of a side; those of weights whose inputs stay float say so where inputs have integers."""
    bits = backend.modes[mode].sides[side].bits
    alone = side == "W" and mode == STATIC
    narrow = [width for width in bits if alone and backend.numbers.block_sizes(QuantSpec(bits=width))]
    return ", ".join(
        [*(f"{run} with float inputs" for run in _runs(narrow)), *_runs(w for w in bits if w not in narrow)]
    )


def _allowed_widths(backend: Backend, side: str) -> str:
    limits = backend.modes[STATIC].sides[side]
    return "" if limits.bits == ANY_BITS else f"{FLOAT}, {_widths(backend, side)}"


def _allowed_schemes(backend: Backend, side: str) -> str:
    limits = backend.modes[STATIC].sides[side]
    missing = [scheme for scheme in (WEIGHT_SCHEMES if side == "W" else SCHEMES) if scheme not in limits.schemes]
    text = f"all but {missing[0]}" if len(missing) == 1 else ", ".join(limits.schemes) if missing else ""
    alone = " and ".join(sorted(backend.numbers.one_scale)) if side == "W" else ""
    return f"{text}, one scale for {alone}" if text and alone else text


ALLOWED: Final[Mapping[str, Callable[[Backend], str]]] = {
    "W.QUANTIZER.BIT": lambda backend: _allowed_widths(backend, "W"),
    "A.QUANTIZER.BIT": lambda backend: _allowed_widths(backend, "A"),
    "W.QSCHEME": lambda backend: _allowed_schemes(backend, "W"),
    "A.QSCHEME": lambda backend: _allowed_schemes(backend, "A"),
}
"""Values of keys that a backend allows in static mode, as text; "" if all."""

DEFAULTS: Final[Mapping[str, Callable[[Backend], str]]] = {
    "W.QSCHEME": lambda backend: backend.modes[STATIC].weights.scheme,
    "A.QSCHEME": lambda backend: backend.modes[STATIC].activations.scheme,
    "W.OBSERVER.TYPE": lambda backend: backend.modes[STATIC].weights.observer,
    "A.OBSERVER.TYPE": lambda backend: backend.modes[STATIC].activations.observer,
}
"""Defaults of keys that each backend has in static mode."""


def _by_text(texts: Mapping[str, str]) -> list[str]:
    """Format texts by backend as ``onnxruntime and qnn: text``, those of equal text together."""
    names: dict[str, list[str]] = {}
    for name, text in texts.items():
        names.setdefault(text, []).append(name)
    return [f"{_joined(same)}: {text}" for text, same in names.items() if text]


def _joined(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def allowed_text(path: str, text: str) -> str:
    """Return the allowed values of a key, with the limits of the backends.

    Args:
        path: of the key.
        text: what the key accepts.
    """
    limits = ALLOWED.get(path)
    texts = {} if limits is None else {name: limits(backend) for name, backend in BACKENDS.usable().items()}
    return "; ".join([text, *_by_text(texts)])


def default_text(path: str, text: str) -> str:
    """Return the default of a key, with those of backends and modes that differ.

    Args:
        path: of the key.
        text: the default of other backends, if none of `DEFAULTS`.
    """
    if path in DEFAULTS:
        values = {name: DEFAULTS[path](backend) for name, backend in BACKENDS.usable().items()}
        text = Counter(values.values()).most_common(1)[0][0]
        return "; ".join([text, *_by_text({name: value for name, value in values.items() if value != text})])
    texts = {
        name if mode == STATIC else f"{name} with {mode}": str(limits.defaults[path])
        for name, backend in BACKENDS.usable().items()
        for mode, limits in backend.modes.items()
        if path in limits.defaults
    }
    return "; ".join([text, *_by_text(texts)])


def limits_table() -> str:
    """Format the limits of all backends and modes as a Markdown table, as in docs/recipe.md."""
    lines = ["| backend | mode | bits of W | W.QSCHEME | bits of A | A.QSCHEME |", "|---|---|---|---|---|---|"]
    for name, backend in BACKENDS.usable().items():
        for mode, limits in backend.modes.items():
            inputs = ["float", ""] if mode == "weight_only" else _cells(backend, "A", mode, limits.activations)
            cells = (f"`{name}`", mode, *_cells(backend, "W", mode, limits.weights), *inputs)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cells(backend: Backend, side: str, mode: str, limits: SideLimits) -> list[str]:
    """Return widths and schemes of a side, with the defaults where there is a choice."""
    schemes: list[str] = list(limits.schemes)
    if set(SCHEMES) <= set(schemes):
        schemes = ["any", limits.scheme]
    if len(schemes) > 1:
        schemes = [f"{name} (default)" if name == limits.scheme else name for name in schemes]
    widths = _widths(backend, side, mode)
    if limits.width != FULL_BITS and len(limits.bits) > 1:
        widths += f"; default {limits.width}"
    return [widths, ", ".join(schemes)]
