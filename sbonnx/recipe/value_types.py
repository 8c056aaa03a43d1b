"""Types of values in a recipe: accepted input, canonical spelling, and JSON schema for editors.

A `ValueReader` converts a value from YAML or Python to the canonical value, or raises `Wrong`. As in Sparsebit,
numbers and booleans may also be quoted.
"""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, get_args

from sbonnx.errors import RecipeError
from sbonnx.recipe import names
from sbonnx.recipe.problem import Wrong, one_of, short
from sbonnx.schemes import VERSIONS, Scheme, Version, WeightScheme
from sbonnx.small_floats import FLOATS, Kind
from sbonnx.system.cpu import CPUS, THIS

_TRUTHS: Final = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_INTEGER: Final = r"[-+]?[0-9]{1,18}"
_FLOAT: Final = r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]{1,3})?"
_TYPE_NAME: Final = r"[a-z][a-z0-9_]*\+?"
_DEVICE: Final = r"auto|cpu|cuda(:[0-9]{1,3})?"
_BOTH_SIDES: Final = r"u?int([0-9]{1,2})"
_PER_SIDE: Final = r"w([0-9]{1,2})(?:a([0-9]{1,2}))?"
_PERCENT: Final = r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*%\s*"

MIN_BITS, MAX_BITS = 2, 16
BLOCK_SIZES: Final = (16, 32, 64, 128, 256)
"""Block sizes of the runtimes' kernels."""

AMBIGUOUS: Final = 0.1
"""Smallest number that is not taken for a share without a percent sign: 0.5 may be meant as 50 % or as 0.5 %."""

LEAST_BYTES: Final = 1 << 16
"""Smallest number that is taken for a number of bytes: smaller ones lack a unit."""

NO_BLOCKS: Final = "none"

FLOAT_BITS: Final = 32
"""In ``w8a32`` the 32 means float."""

CACHE_BITS: Final = (8, 4)
"""Bits of key/value caches that onnxruntime's attention stores."""

_QUOTES: Final = "Put names that look like numbers or truth values in quotes"

Number = TypeVar("Number", int, float)

_BOUNDS: Final[dict[str, Callable[[float, float], bool]]] = {
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
}
"""Comparisons by their names in a JSON schema."""


@dataclass(frozen=True, eq=False)
class ValueReader:
    """Annotation of a type.

    Attributes:
        read: converts a value to the canonical one.
        schema: JSON schema of the accepted values; None: that of the type.
    """

    read: Callable[[Any], Any]
    schema: Mapping[str, Any] | None = None

    def reader(self, kind: Any) -> ValueReader:
        """Return the reader itself, see `AnyCase.reader`."""
        return self


def flag(value: object) -> bool:
    """Read a boolean."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _TRUTHS:
        return _TRUTHS[value.lower()]
    raise Wrong("must be true or false", value=value)


def integer(value: object) -> int | None:
    """Read an integer of at most 64 bits, or return None if it is not an integer. True does not count as 1."""
    if isinstance(value, str) and re.fullmatch(_INTEGER, value):
        return int(value)
    if isinstance(value, Integral) and not isinstance(value, bool) and abs(int(value)) < 1 << 63:
        return int(value)
    return None


def number(value: object) -> float | None:
    """Read a finite float, or return None if it is not a number."""
    if isinstance(value, bool) or not isinstance(value, Real | str):
        return None
    if isinstance(value, str) and not re.fullmatch(_FLOAT, value):
        return None
    try:
        parsed = float(value)
    except OverflowError:  # an integer of more than 308 digits
        return None
    return parsed if math.isfinite(parsed) else None


def _accepted(found: Number | None, accepts: Callable[[Number], bool], text: str, value: object) -> Number:
    """Return a number that was read from `value` and is acceptable; `text` says which ones are."""
    if found is None or not accepts(found):
        raise Wrong(f"must be {text}", value=value)
    return found


def bits(value: object) -> int:
    """Read a bit width: 0 (float) or 2 to 16."""
    text = f"0 (float) or a whole number of bits from {MIN_BITS} to {MAX_BITS}"
    return _accepted(integer(value), lambda width: width == 0 or MIN_BITS <= width <= MAX_BITS, text, value)


def bits_by_side(value: object) -> dict[str, int]:
    """Read ``w8a8``, ``int8`` or ``8`` as {"W": 8, "A": 8}, ``w8`` as {"W": 8}; 32 means float, which becomes 0."""
    both = re.fullmatch(_BOTH_SIDES, value, re.IGNORECASE) if isinstance(value, str) else None
    value = both[1] if both else value
    match = re.fullmatch(_PER_SIDE, value, re.IGNORECASE) if isinstance(value, str) else None
    widths: dict[str, object] = {"W": match[1], "A": match[2]} if match else {"W": value, "A": value}
    if match and match[2] is None:
        del widths["A"]
    try:
        return {side: bits(0 if integer(width) == FLOAT_BITS else width) for side, width in widths.items()}
    except Wrong as problem:
        text = (
            f"must be a form like w8a8, w4, int8 or 8, with widths 0 or {MIN_BITS} to {MAX_BITS} (32 or 0: float), or "
        )
        text += ", ".join(FLOATS)
        raise Wrong(text, value=value) from problem


def whole(text: str, low: int, high: int | None = None, **schema: int) -> ValueReader:
    """Return a reader of whole numbers from `low` to `high`.

    Args:
        text: the accepted values, as in "must be ...".
        schema: further entries of the JSON schema.
    """

    def read(value: object) -> int:
        return _accepted(integer(value), lambda found: found >= low and (high is None or found <= high), text, value)

    return ValueReader(read, {"type": "integer", "minimum": low, **schema})


def _cache_bits(value: object) -> int:
    return _accepted(integer(value), lambda found: found in CACHE_BITS, "8 or 4", value)


def real(text: str, **bounds: float) -> ValueReader:
    """Return a reader of numbers.

    Args:
        text: the accepted values, as in "must be ...".
        bounds: limits by their names in a JSON schema, see `_BOUNDS`.
    """

    def accepts(found: float) -> bool:
        return all(_BOUNDS[name](found, bound) for name, bound in bounds.items())

    def read(value: object) -> float:
        return _accepted(number(value), accepts, text, value)

    return ValueReader(read, {"type": "number", **bounds})


def share_or_percent(value: object) -> float:
    """Read a share as a number from 0 to 1, or in percent: ``0.005`` or ``0.5%``.

    A number of `AMBIGUOUS` and more may be meant in percent, and is refused.
    """
    match = re.fullmatch(_PERCENT, value) if isinstance(value, str) else None
    parsed = float(match[1]) / 100 if match else number(value)
    share = _accepted(parsed, lambda share: 0 <= share <= 1, "a share, 0 to 1 or in percent such as 0.5%", value)
    if share >= AMBIGUOUS and not match:
        raise Wrong(
            f"must have a percent sign from {AMBIGUOUS:g} on: write {share:g}% or {share * 100:g}%", value=value
        )
    return share


def _widths(value: object) -> tuple[int, ...]:
    """Read bit widths: unique, ascending, float (0) last."""
    if isinstance(value, str):
        value = [part for part in re.split(r"[\s,/]+", value) if part]
    if not isinstance(value, list | tuple):
        raise Wrong("must be a list of widths", value=value)
    named = [0 if width == "float" else width for width in value]
    widths = {0 if integer(width) == FLOAT_BITS else bits(width) for width in named}
    return tuple(sorted(widths, key=lambda width: width or FLOAT_BITS))


def _accuracy_level(value: object) -> int | Literal["auto"]:
    """Read an accuracy level of MatMulNBits, or "auto"."""
    if isinstance(value, str) and value.lower() == "auto":
        return "auto"
    return _accepted(integer(value), lambda found: 0 <= found <= 4, "auto, or a level of MatMulNBits, 0 to 4", value)


def _multiple(value: object) -> int | str:
    """Read a whole number of at least 1, or "auto"."""
    if isinstance(value, str) and value.lower() == "auto":
        return "auto"
    return _accepted(integer(value), lambda found: found >= 1, "auto, or a whole number, 1 or more", value)


def _strength(value: object) -> float | bool | str:
    """Read a strength from 0 to 1, a boolean for the default strength or none, or "auto"."""
    if isinstance(value, str) and value.lower() == "auto":
        return "auto"
    strength = None if isinstance(value, bool) else number(value)
    if strength is not None and 0 <= strength <= 1:
        return strength
    try:
        return flag(value)
    except Wrong as problem:
        raise Wrong("must be auto, true, false or a number from 0 to 1", value=value) from problem


def _by_output(read_one: Callable[[object, str], Any], kind: str, one: dict[str, Any]) -> ValueReader:
    """Return a reader of one value for all outputs, or {output: value}.

    Args:
        read_one: reads a value; its second argument ends the text that says what is accepted.
        kind: name of a value, for that text.
        one: JSON schema of a value.
    """

    def read(value: object) -> Any:
        if not isinstance(value, Mapping):
            return read_one(value, f", or a mapping {{output: {kind}}}")
        for name in value:
            if not isinstance(name, str) or not name:
                raise Wrong(f"has the key {short(name)}: outputs are named in text")
        return {name: read_one(entry, f" for output {short(name)}") for name, entry in value.items()}

    return ValueReader(read, {"anyOf": [one, {"type": "object", "additionalProperties": one}]})


def _numbers_by_output(text: str, schema: dict[str, Any], **bounds: float) -> ValueReader:
    """Return a reader of one number, or {output: number}."""
    return _by_output(lambda value, more: float(real(f"{text}{more}", **bounds).read(value)), "number", schema)


def _output_task(value: object, more: str) -> str:
    if not isinstance(value, str) or value.lower() not in names.OUTPUT_TASKS:
        raise Wrong(f"must be {one_of(names.OUTPUT_TASKS)}{more}", value=value)
    return value.lower()


def _plain_text(value: object) -> str:
    """Read a text that is not empty."""
    if isinstance(value, str) and value:
        return value
    raise Wrong("must be a text", value=value)


def _version(value: object) -> str:
    """Read a version of TensorRT as text: YAML parses 11 as an integer and 8.6 as a float."""
    plain = not isinstance(value, bool) and isinstance(value, str | int | float)
    text = str(value).removesuffix(".0") if plain else ""
    if text in VERSIONS:
        return text
    raise Wrong(f"must be a version of TensorRT, {one_of(VERSIONS)}", value=value)


def _block_size(value: object) -> int | str:
    """Read one of `BLOCK_SIZES`, or "none"."""
    if isinstance(value, str) and value.lower() == NO_BLOCKS:
        return NO_BLOCKS
    text = f"none or a power of two from {BLOCK_SIZES[0]} to {BLOCK_SIZES[-1]}"
    return _accepted(integer(value), BLOCK_SIZES.__contains__, text, value)


def _interval(value: object) -> tuple[float, float]:
    ends = [number(end) for end in value] if isinstance(value, list | tuple) else []
    if len(ends) != 2 or ends[0] is None or ends[1] is None or not ends[0] < ends[1]:
        raise Wrong("must be [lo, hi], two finite numbers, the lower one first", value=value)
    return ends[0], ends[1]


def type_name(value: object) -> str:
    """Read the name of a quantizer or observer in canonical form: lower case, ``lsq_plus`` as ``lsq+``."""
    if isinstance(value, str):
        name = value.strip().lower().replace("-", "_")
        if re.fullmatch(_TYPE_NAME, name):
            return names.ALIASES.get(name, name)
    raise Wrong("must be the name of a type, such as minmax or uniform", value=value)


def _device(value: object) -> str:
    if isinstance(value, str) and re.fullmatch(_DEVICE, value.lower()):
        return value.lower()
    raise Wrong("must be auto, cpu, cuda or cuda:N", value=value)


def _memory(value: object) -> str:
    number_of_bytes = integer(value)
    text = value if number_of_bytes is None else str(number_of_bytes)
    problem = Wrong("must be a size such as '2 GiB' or '500 MB'", value=value)
    if not isinstance(text, str) or len(text) > 30 or not text.strip()[:1].isdigit():
        raise problem
    from sbonnx.options import parse_size

    try:
        size = parse_size(text)
    except RecipeError as error:
        raise problem from error
    if size < 1:
        raise Wrong("must be more than 0 bytes", value=value)
    if number_of_bytes is not None and size < LEAST_BYTES:
        raise Wrong(f"is {size} bytes: write a unit, such as '{size} MiB' or '{size} GiB'", value=value)
    return text.strip()


def _folder(value: object) -> str | None:
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise Wrong("must be the path of a folder, or none", value=value)
    return None if text.lower() == "none" else text


def _file(value: object) -> str | None:
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise Wrong("must be the path of a file, or none", value=value)
    return None if text.lower() == "none" else text


def _kernel_costs(value: object) -> str:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value) or "\0" in str(value):
        raise Wrong("must be bundled, none or the path of a file", value=value)
    text = str(os.fspath(value))
    return text.lower() if text.lower() in ("bundled", "none") else text


def _cpu(value: object) -> str:
    words = (THIS, *CPUS)
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if isinstance(text, str) and text.lower() in words:
        return text.lower()
    if not isinstance(text, str) or "\0" in text or Path(text).suffix.lower() != ".json":
        raise Wrong(f"must be {', '.join(words)} or the .json file of a table of kernel costs", value=value)
    return text


def _feedback(value: object) -> dict[str, str]:
    """Read {output: input}; every input once."""
    if not isinstance(value, Mapping):
        raise Wrong("must be a mapping {output: input}", value=value)
    taken: dict[str, str] = {}
    for output, name in value.items():
        if not isinstance(output, str) or not isinstance(name, str) or not output or not name:
            text = f"must map names of outputs to names of inputs, got {short(output)}: {short(name)}"
            raise Wrong(text, _QUOTES)
        if name in taken:
            raise Wrong(f"feeds {short(name)} from two outputs, {short(taken[name])} and {short(output)}")
        taken[name] = output
    return {output: name for name, output in taken.items()}


def _of_type(value: object, types: type | tuple[type, ...], text: str) -> object:
    if isinstance(value, types):
        return value
    raise Wrong(f"must be {text}", value=value)


def items(value: object) -> object:
    """Read a list, or a single text as a list of one; anything else is invalid (sets have no order)."""
    return [value] if isinstance(value, str) else _of_type(value, (list, tuple), "a list of patterns")


def _names(value: object) -> tuple[str, ...]:
    """Read names: a list, or a text with commas; in lower case."""
    listed = value.split(",") if isinstance(value, str) else value
    if not isinstance(listed, list | tuple) or not all(isinstance(name, str) and name.strip() for name in listed):
        raise Wrong("must be a list of names, or names separated by commas", value=value)
    return tuple(dict.fromkeys(name.strip().lower() for name in listed))


def a_list(value: object) -> object:
    """Read a list."""
    return _of_type(value, (list, tuple), "a list")


def _one_or_list(value: object) -> object:
    """Read a list, or a single mapping as a list of one."""
    return [value] if isinstance(value, Mapping) else a_list(value)


def a_mapping(value: object) -> object:
    """Read a mapping."""
    return _of_type(value, Mapping, "a mapping")


def _pattern(value: object) -> str:
    if not isinstance(value, str):
        raise Wrong("must be text", _QUOTES, value=value)
    from sbonnx.recipe.node_patterns import check_pattern

    fault = check_pattern(value)
    if fault is not None:
        raise Wrong(fault, value=value)
    return value


def _tensor_pattern(value: object) -> str:
    from sbonnx.recipe.node_patterns import FLOW

    pattern = _pattern(value)
    if pattern.lower().startswith(("op:", "node:", *(f"{prefix}:" for prefix in FLOW))):
        raise Wrong(f"is a pattern for nodes, and this key has tensors: {short(pattern)}")
    return pattern


def _name(value: object) -> str:
    return str(_of_type(value, str, "a name"))


def _node_pattern(value: object) -> str:
    pattern = _pattern(value)
    if pattern.lower().startswith("tensor:"):
        raise Wrong(f"is a pattern for tensors, and this key has nodes: {short(pattern)}")
    return pattern


def _pruning_type(value: object) -> str:
    """Read what is removed; Sparsebit spells "structed"."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = f"{value // 60}:{value % 60}"  # YAML 1.1 reads 2:4 as a number in base 60
    name = value.lower() if isinstance(value, str) else ""
    name = names.PRUNING_ALIASES.get(name, name)
    if name in get_args(names.PruningTypeName):
        return name
    from sbonnx.linear.zero_patterns import sparsity_pattern

    try:
        return str(sparsity_pattern(name))
    except RecipeError as problem:
        raise Wrong(
            f"must be {one_of([*get_args(names.PruningTypeName), 'N:M such as 2:4'])}", value=value
        ) from problem


def _refit(value: object) -> str:
    """Read a kind of refit; true and false stand for pruned and none."""
    name = value.lower() if isinstance(value, str) else value
    if name in ("pruned", "none"):
        return str(name)
    try:
        return "pruned" if flag(value) else "none"
    except Wrong as problem:
        raise Wrong("must be pruned or none", value=value) from problem


def _augment(value: object) -> str:
    """Read auto, none, or names of augmentations: a list, or a text with commas."""
    listed = value.split(",") if isinstance(value, str) else value
    if isinstance(listed, (list, tuple)) and listed and all(isinstance(name, str) for name in listed):
        chosen = [name.strip().lower() for name in listed]
        if chosen in (["auto"], ["none"]) or set(chosen) <= set(names.AUGMENTATIONS):
            return ",".join(chosen)
    raise Wrong(f"must be auto, none, or some of {', '.join(names.AUGMENTATIONS)}, separated by commas", value=value)


def _in_any_case(words: Sequence[str]) -> dict[str, Any]:
    """Return a JSON schema that offers `words` and accepts them in any case."""
    return {"type": "string", "anyOf": [{"enum": list(words)}, {"pattern": f"^{pattern_of(words)}$"}]}


def pattern_of(words: Sequence[str]) -> str:
    """Return a regular expression that matches any of `words` in any case."""
    cased = ["".join(f"[{c.upper()}{c.lower()}]" if c.isalpha() else c for c in word) for word in words]
    return f"({'|'.join(cased)})"


@dataclass(frozen=True)
class AnyCase:
    """Annotation of a type: the names of a Literal, or the rows of a table, are accepted in any case."""

    table: Mapping[str, Any] | None = None

    def reader(self, kind: Any) -> ValueReader:
        """Return the reader for the Literal `kind`, or of the table."""
        words = list(get_args(kind) if self.table is None else self.table)

        def read(value: object) -> str:
            spelled = {name.lower(): name for name in words}
            if isinstance(value, str) and value.lower() in spelled:
                return str(spelled[value.lower()])
            raise Wrong(f"must be {one_of(spelled.values())}", value=value)

        return ValueReader(read, _in_any_case(words))


ANY_CASE: Final = AnyCase()


def _type(known: tuple[str, ...], refused: frozenset[str] = frozenset()) -> ValueReader:
    """Return a reader of types. The JSON schema offers those known for this side and accepts any name (plug-ins)."""
    offered = {"enum": [name for name in known if name not in refused]}
    return ValueReader(type_name, {"type": "string", "anyOf": [offered, {"pattern": "^[A-Za-z][A-Za-z0-9_-]*[+]?$"}]})


_TEXT = {"type": "string", "minLength": 1}
_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_BITS = {"type": "integer", "enum": [0, *range(MIN_BITS, MAX_BITS + 1)]}
_BLOCKS = {"anyOf": [{"type": "integer", "enum": list(BLOCK_SIZES)}, {"enum": [NO_BLOCKS]}]}
_PAIR = {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}
_DEVICES = {"type": "string", "pattern": "^([Aa][Uu][Tt][Oo]|[Cc][Pp][Uu]|[Cc][Uu][Dd][Aa](:[0-9]+)?)$"}
_TAIL = "a share of the values, from 0 to below 0.5 (0.001 cuts the outermost 0.1 % on each side)"

_NUMBER = {"type": "number"}
_COSINE = {"type": "number", "minimum": -1, "maximum": 1}
_DECIBEL = {"minimum": -1000.0, "maximum": 1000.0}
_STRENGTHS = {"anyOf": [{"type": "boolean"}, {"const": "auto"}, {"type": "number", "minimum": 0, "maximum": 1}]}
_LEVELS = {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 4}, _in_any_case(["auto"])]}
_MULTIPLES = {"anyOf": [{"type": "integer", "minimum": 1}, _in_any_case(["auto"])]}
_NUMBER_OR_TEXT = {"anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, {"type": "string"}]}
_CPUS = _in_any_case((THIS, *CPUS))
_CPUS["anyOf"].append({"pattern": "[.][Jj][Ss][Oo][Nn]$"})
_WIDTHS = {
    "anyOf": [{"type": "array", "items": {"anyOf": [{"type": "integer"}, {"const": "float"}]}}, {"type": "string"}]
}
_PRUNING_TYPES = _in_any_case([*get_args(names.PruningTypeName), *names.PRUNING_ALIASES, "2:4"])
_PRUNING_TYPES["anyOf"].append({"pattern": "^[0-9]+:[0-9]+$"})
_AUGMENTATION = pattern_of(names.AUGMENTATIONS)
_AUGMENTS = {
    "anyOf": [
        {
            "type": "string",
            "pattern": f"^ *({pattern_of(['auto', 'none'])}|{_AUGMENTATION}( *, *{_AUGMENTATION})*) *$",
        },
        {"type": "array", "items": {"type": "string", "pattern": f"^ *{_AUGMENTATION} *$"}, "minItems": 1},
    ]
}
_REFITS = {"anyOf": [{"enum": ["pruned", "none"]}, {"type": "boolean"}]}

Flag = Annotated[bool, ValueReader(flag, {"type": "boolean"})]
Bits = Annotated[int, ValueReader(bits, _BITS)]
Count = Annotated[int, whole("a whole number, 1 or more", 1)]
CacheBits = Annotated[int, ValueReader(_cache_bits, {"type": "integer", "enum": list(CACHE_BITS)})]
CountOrNone = Annotated[int, whole("a whole number, 0 or more", 0)]
Seed = Annotated[int, whole("a whole number, 0 or more, of up to 18 digits", 0, 10**18 - 1)]  # as `integer` reads
AccuracyLevel = Annotated[int | Literal["auto"], ValueReader(_accuracy_level, _LEVELS)]
Share = Annotated[float, real("a share, from 0 to 1", minimum=0, maximum=1)]
Tail = Annotated[float, real(_TAIL, minimum=0, exclusiveMaximum=0.5)]
Ratio = Annotated[float, real("a number from 0 to below 1", minimum=0, exclusiveMaximum=1)]
PartialShare = Annotated[float, real("a share between 0 and 1, such as 0.5", exclusiveMinimum=0, exclusiveMaximum=1)]
AboveZero = Annotated[float, real("a number above 0", exclusiveMinimum=0)]
Interval = Annotated[tuple[float, float], ValueReader(_interval, _PAIR)]
WeightQuantizerName = Annotated[str, _type(names.QUANTIZERS, names.ONLY_ACTIVATIONS)]
WeightObserverName = Annotated[str, _type(names.OBSERVERS, names.ONLY_ACTIVATIONS)]
ActivationQuantizerName = Annotated[str, _type(names.QUANTIZERS, names.ONLY_WEIGHTS)]
ActivationObserverName = Annotated[str, _type(names.OBSERVERS, names.ONLY_WEIGHTS)]
RoundingName = Annotated[str, _type(names.ROUNDINGS)]
VersionName = Annotated[Version, ValueReader(_version, {"anyOf": [{"enum": list(VERSIONS)}, {"type": "number"}]})]
DtypeName = Annotated[Kind, ANY_CASE]
BlockSize = Annotated[int | str, ValueReader(_block_size, _BLOCKS)]
SchemeName = Annotated[Scheme, ANY_CASE]
WeightSchemeName = Annotated[WeightScheme, ANY_CASE]
Device = Annotated[str, ValueReader(_device, _DEVICES)]
Memory = Annotated[str, ValueReader(_memory, {"type": ["string", "integer"], "pattern": "^ *[0-9]"})]
ModeName = Annotated[names.Mode, ANY_CASE]
Text = Annotated[str, ValueReader(_plain_text, _TEXT)]
Folder = Annotated[str | None, ValueReader(_folder, _TEXT)]
OptionalFile = Annotated[str | None, ValueReader(_file, _TEXT)]
KernelCosts = Annotated[str, ValueReader(_kernel_costs, _TEXT)]
Cpu = Annotated[str, ValueReader(_cpu, _CPUS)]
Feedback = Annotated[dict[str, str], ValueReader(_feedback, {"type": "object", "additionalProperties": _TEXT})]
Pattern = Annotated[str, ValueReader(_pattern, _TEXT)]
TensorPattern = Annotated[str, ValueReader(_tensor_pattern, _TEXT)]
Patterns = Annotated[tuple[Pattern, ...], ValueReader(items, _TEXTS)]
NodePattern = Annotated[str, ValueReader(_node_pattern, _TEXT)]
Names = Annotated[tuple[str, ...], ValueReader(_names, _TEXTS)]
TensorGroup = Annotated[tuple[TensorPattern, ...], ValueReader(items, _TEXTS)]
NodeName = Annotated[str, ValueReader(_name, _TEXT)]
NodeNames = Annotated[tuple[NodeName, ...], ValueReader(items, _TEXTS)]
Multiple = Annotated[int | Literal["auto"], ValueReader(_multiple, _MULTIPLES)]
Strength = Annotated[float | bool | Literal["auto"], ValueReader(_strength, _STRENGTHS)]
Decibel = Annotated[float, ValueReader(real("a number of decibel", **_DECIBEL).read, _NUMBER)]
DecibelByOutput = Annotated[float | dict[str, float], _numbers_by_output("a number of decibel", _NUMBER, **_DECIBEL)]
CosineByOutput = Annotated[
    float | dict[str, float], _numbers_by_output("a cosine, -1 to 1", _COSINE, minimum=-1, maximum=1)
]
TaskByOutput = Annotated[
    names.OutputTask | dict[str, names.OutputTask], _by_output(_output_task, "task", {"enum": list(names.OUTPUT_TASKS)})
]
Percentage = Annotated[float, ValueReader(share_or_percent, _NUMBER_OR_TEXT)]
PruningType = Annotated[str, ValueReader(_pruning_type, _PRUNING_TYPES)]
PruningStrategy = Annotated[names.PruningStrategyName, ANY_CASE]
Augment = Annotated[str, ValueReader(_augment, _AUGMENTS)]
PruningRefit = Annotated[Literal["pruned", "none"], ValueReader(_refit, _REFITS)]
Widths = Annotated[tuple[int, ...], ValueReader(_widths, _WIDTHS)]
Start = Annotated[Literal["gptq", "nearest"], ANY_CASE]
Ramp = Annotated[Literal["linear", "cosine"], ANY_CASE]
Distribution = Annotated[Literal["gaus", "laplace"], ANY_CASE]
Layout = Annotated[Literal["NCHW", "NLC"], ANY_CASE]

LIST: Final = ValueReader(a_list)
ONE_OR_LIST: Final = ValueReader(_one_or_list)
MAPPING: Final = ValueReader(a_mapping)
"""Readers of the outer form; what it contains has its own."""
