"""Types of values in a recipe: accepted input, canonical spelling, and JSON schema for editors.

Each reader converts a value from YAML or Python to the canonical value, or raises `Wrong`. As in
Sparsebit, numbers and booleans may also be quoted.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Annotated, Final

from pydantic import BeforeValidator, WithJsonSchema

from sbonnx.backends.tensorrt.profiles import VERSIONS, Version
from sbonnx.recipe import names
from sbonnx.recipe.node_patterns.matching import check_pattern
from sbonnx.recipe.problem import UNSAID, Wrong, one_of, short
from sbonnx.spec import Kind

_TRUTHS: Final = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_INTEGER = re.compile(r"[-+]?[0-9]{1,18}")
_NUMBER = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]{1,3})?")
_TYPE_NAME = re.compile(r"[a-z][a-z0-9_]*\+?")
_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?")
_MEMORY = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([kmgt]?)(i?)b?", re.IGNORECASE)
_PER_SIDE = re.compile(r"w([0-9]{1,2})a([0-9]{1,2})", re.IGNORECASE)

MIN_BITS: Final = 2
MAX_BITS: Final = 16
BLOCK_SIZES: Final = (16, 32, 64, 128, 256)
"""Block sizes of the runtimes' kernels."""

NO_BLOCKS: Final = "none"

FLOAT_BITS: Final = 32
"""In ``w8a32`` the 32 means float."""


def flag(value: object) -> bool:
    """Read a boolean."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _TRUTHS:
        return _TRUTHS[value.lower()]
    raise Wrong("must be true or false", value=value)


def integer(value: object) -> int | None:
    """Read an integer of at most 64 bits, or return None if it is not an integer. True does not count as 1."""
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        return int(value)
    if isinstance(value, Integral) and not isinstance(value, bool) and abs(int(value)) < 1 << 63:
        return int(value)
    return None


def number(value: object) -> float | None:
    """Read a finite float, or return None if it is not a number."""
    if isinstance(value, bool) or not isinstance(value, Real | str):
        return None
    if isinstance(value, str) and not _NUMBER.fullmatch(value):
        return None
    try:
        found = float(value)
    except OverflowError:  # an integer of more than 308 digits
        return None
    return found if math.isfinite(found) else None


def bits(value: object) -> int:
    """Read a bit width: 0 (float) or 2 to 16."""
    found = integer(value)
    if found is None or not (found == 0 or MIN_BITS <= found <= MAX_BITS):
        raise Wrong(f"must be 0 (float) or a whole number of bits from {MIN_BITS} to {MAX_BITS}", value=value)
    return found


def both_bits(value: object) -> dict[str, int]:
    """Read ``w8a8`` or ``8`` as {"W": 8, "A": 8}; 32 means float, which becomes 0."""
    match = _PER_SIDE.fullmatch(value) if isinstance(value, str) else None
    widths: list[object] = [int(match[1]), int(match[2])] if match else [value, value]
    try:
        weight, activation = (bits(0 if integer(width) == FLOAT_BITS else width) for width in widths)
    except Wrong as problem:
        text = f"must be a form like w8a8, or a number, with widths 0 or {MIN_BITS} to {MAX_BITS} (32 or 0: float)"
        raise Wrong(text, value=value) from problem
    return {"W": weight, "A": activation}


def positive(value: object) -> int:
    """Read a whole number from 1 up."""
    found = integer(value)
    if found is None or found < 1:
        raise Wrong("must be a whole number, 1 or more", value=value)
    return found


def _accuracy_level(value: object) -> int:
    found = integer(value)
    if found is None or not 0 <= found <= 4:
        raise Wrong("must be a level of MatMulNBits, 0 to 4", value=value)
    return found


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
    found = integer(value)
    if found is None or found not in BLOCK_SIZES:
        raise Wrong(f"must be none or a power of two from {BLOCK_SIZES[0]} to {BLOCK_SIZES[-1]}", value=value)
    return found


def _tail(value: object) -> float:
    found = number(value)
    if found is None or not 0 <= found < 0.5:
        hint = "Write 0.001 to cut the outermost tenth of a percent on each side"
        raise Wrong("must be a share of the values, from 0 to below 0.5", hint, value=value)
    return found


def _ratio(value: object) -> float:
    found = number(value)
    if found is None or not 0 <= found < 1:
        raise Wrong("must be the weight of the old value, from 0 to below 1", value=value)
    return found


def _above_zero(value: object) -> float:
    found = number(value)
    if found is None or found <= 0:
        raise Wrong("must be a number above 0", value=value)
    return found


def _share(value: object) -> float:
    found = number(value)
    if found is None or not 0 <= found <= 1:
        raise Wrong("must be a share, from 0 to 1", value=value)
    return found


def _not_negative(value: object) -> int:
    found = integer(value)
    if found is None or found < 0:
        raise Wrong("must be a whole number, 0 or more", value=value)
    return found


def _interval(value: object) -> tuple[float, float]:
    ends = [number(end) for end in value] if isinstance(value, list | tuple) else []
    if len(ends) != 2 or ends[0] is None or ends[1] is None or not ends[0] < ends[1]:
        raise Wrong("must be [lo, hi], two finite numbers, the lower one first", value=value)
    return ends[0], ends[1]


def type_name(value: object) -> str:
    """Read the name of a quantizer or observer in canonical form: lower case, ``lsq_plus`` as ``lsq+``."""
    if isinstance(value, str):
        name = value.strip().lower().replace("-", "_")
        if _TYPE_NAME.fullmatch(name):
            return names.ALIASES.get(name, name)
    raise Wrong("must be the name of a type, such as minmax or uniform", value=value)


def _device(value: object) -> str:
    if isinstance(value, str) and _DEVICE.fullmatch(value.lower()):
        return value.lower()
    raise Wrong("must be auto, cpu, cuda or cuda:N", value=value)


def memory_bytes(text: str) -> int:
    """Convert ``2 GiB``, ``512MB`` or ``1000000`` to a number of bytes."""
    match = _MEMORY.fullmatch(text.strip())
    if match is None:
        raise Wrong("must be a size such as '2 GiB' or '500 MB'", value=text)
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** ("kmgt".index(match[2].lower()) + 1 if match[2] else 0))


def _memory(value: object) -> str:
    whole = integer(value)
    text = str(whole) if whole is not None else value
    if not isinstance(text, str) or len(text) > 30 or _MEMORY.fullmatch(text.strip()) is None:
        raise Wrong("must be a size such as '2 GiB' or '500 MB'", value=value)
    if memory_bytes(text) < 1:
        raise Wrong("must be more than nothing", value=value)
    return text.strip()


def _folder(value: object) -> str | None:
    if not isinstance(value, str | os.PathLike):
        raise Wrong("must be the path of a folder, or none", value=value)
    text = os.fspath(value)
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise Wrong("must be the path of a folder, or none", value=value)
    return None if text.lower() == "none" else text


def _kernel_costs(value: object) -> str:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value) or "\0" in str(value):
        raise Wrong("must be bundled, none or the path of a file", value=value)
    text = str(os.fspath(value))
    return text.lower() if text.lower() in ("bundled", "none") else text


def _seed(value: object) -> int:
    found = integer(value)
    if found is None or not 0 <= found < 10**18:  # `integer` reads up to 18 digits from YAML text
        raise Wrong("must be a whole number, 0 or more, of up to 18 digits", value=value)
    return found


def _feedback(value: object) -> dict[str, str]:
    """Read {output: input}; every input once."""
    if not isinstance(value, Mapping):
        raise Wrong("must be a mapping {output: input}", value=value)
    taken: dict[str, str] = {}
    for output, name in value.items():
        if not isinstance(output, str) or not isinstance(name, str) or not output or not name:
            hint = "Put names that look like numbers or truth values in quotes"
            raise Wrong(f"must lead outputs to inputs by name, got {short(output)}: {short(name)}", hint, value=UNSAID)
        if name in taken:
            raise Wrong(f"feeds {short(name)} from two outputs, {short(taken[name])} and {short(output)}", value=UNSAID)
        taken[name] = output
    return {output: name for name, output in taken.items()}


def items(value: object) -> object:
    """Read a list, or a single text as a list of one; anything else is invalid (sets have no order)."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list | tuple):
        return value
    raise Wrong("must be a list of patterns", value=value)


def a_list(value: object) -> object:
    """Read a list."""
    if isinstance(value, list | tuple):
        return value
    raise Wrong("must be a list", value=value)


def a_mapping(value: object) -> object:
    """Read a mapping."""
    if isinstance(value, Mapping):
        return value
    raise Wrong("must be a mapping", value=value)


def _pattern(value: object) -> str:
    if not isinstance(value, str):
        raise Wrong("must be text", "Put names that look like numbers or truth values in quotes", value=value)
    fault = check_pattern(value)
    if fault is not None:
        raise Wrong(fault, value=value)
    return value


def _tensor_pattern(value: object) -> str:
    pattern = _pattern(value)
    if pattern.lower().startswith(("op:", "node:")):
        raise Wrong(f"names a node where a tensor is meant: {short(pattern)}", value=UNSAID)
    return pattern


def choice(allowed: tuple[str, ...]) -> Callable[[object], str]:
    spelled = {name.lower(): name for name in allowed}

    def read(value: object) -> str:
        if isinstance(value, str) and value.lower() in spelled:
            return spelled[value.lower()]
        raise Wrong(f"must be {one_of(allowed)}", value=value)

    return read


def schema(allowed: tuple[str, ...]) -> WithJsonSchema:
    """Return a JSON schema for editors that offers `allowed` and accepts any case of them."""
    cased = ["".join(f"[{c.upper()}{c.lower()}]" if c.isalpha() else c for c in name) for name in allowed]
    pattern = {"pattern": f"^({'|'.join(cased)})$"}
    return WithJsonSchema({"type": "string", "anyOf": [{"enum": list(allowed)}, pattern]})


def _type_schema(known: tuple[str, ...], refused: frozenset[str]) -> WithJsonSchema:
    """Return a JSON schema for editors that offers the known types of this side and accepts any name (plug-ins)."""
    offered = {"enum": [name for name in known if name not in refused]}
    return WithJsonSchema({"type": "string", "anyOf": [offered, {"pattern": "^[A-Za-z][A-Za-z0-9_-]*[+]?$"}]})


_LIST_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}

Flag = Annotated[bool, BeforeValidator(flag), WithJsonSchema({"type": "boolean"})]
Bits = Annotated[
    int,
    BeforeValidator(bits),
    WithJsonSchema({"type": "integer", "enum": [0, *range(MIN_BITS, MAX_BITS + 1)]}),
]
Count = Annotated[int, BeforeValidator(positive), WithJsonSchema({"type": "integer", "minimum": 1})]
CountOrNone = Annotated[int, BeforeValidator(_not_negative), WithJsonSchema({"type": "integer", "minimum": 0})]
Share = Annotated[float, BeforeValidator(_share), WithJsonSchema({"type": "number", "minimum": 0, "maximum": 1})]
Tail = Annotated[
    float, BeforeValidator(_tail), WithJsonSchema({"type": "number", "minimum": 0, "exclusiveMaximum": 0.5})
]
Ratio = Annotated[
    float, BeforeValidator(_ratio), WithJsonSchema({"type": "number", "minimum": 0, "exclusiveMaximum": 1})
]
AboveZero = Annotated[float, BeforeValidator(_above_zero), WithJsonSchema({"type": "number", "exclusiveMinimum": 0})]
Interval = Annotated[
    tuple[float, float],
    BeforeValidator(_interval),
    WithJsonSchema({"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}),
]
WeightQuantizerName = Annotated[str, BeforeValidator(type_name), _type_schema(names.QUANTIZERS, names.ONLY_ACTIVATIONS)]
WeightObserverName = Annotated[str, BeforeValidator(type_name), _type_schema(names.OBSERVERS, names.ONLY_ACTIVATIONS)]
ActivationQuantizerName = Annotated[str, BeforeValidator(type_name), _type_schema(names.QUANTIZERS, names.ONLY_WEIGHTS)]
ActivationObserverName = Annotated[str, BeforeValidator(type_name), _type_schema(names.OBSERVERS, names.ONLY_WEIGHTS)]
RoundingName = Annotated[str, BeforeValidator(type_name), _type_schema(names.ROUNDINGS, frozenset())]
VersionName = Annotated[
    Version,
    BeforeValidator(_version),
    WithJsonSchema({"anyOf": [{"enum": list(VERSIONS)}, {"type": "number"}]}),
]
DtypeName = Annotated[Kind, BeforeValidator(choice(names.DTYPES)), schema(names.DTYPES)]
BlockSize = Annotated[
    int | str,
    BeforeValidator(_block_size),
    WithJsonSchema({"anyOf": [{"type": "integer", "enum": list(BLOCK_SIZES)}, {"enum": [NO_BLOCKS]}]}),
]
BackendName = Annotated[names.Backend, BeforeValidator(choice(names.BACKENDS)), schema(names.BACKENDS)]
SchemeName = Annotated[names.Scheme, BeforeValidator(choice(names.SCHEMES)), schema(names.SCHEMES)]
WeightSchemeName = Annotated[
    names.WeightScheme, BeforeValidator(choice(names.WEIGHT_SCHEMES)), schema(names.WEIGHT_SCHEMES)
]
Distribution = Annotated[str, BeforeValidator(choice(names.DISTRIBUTIONS)), schema(names.DISTRIBUTIONS)]
Layout = Annotated[str, BeforeValidator(choice(names.LAYOUTS)), schema(names.LAYOUTS)]
Device = Annotated[
    str,
    BeforeValidator(_device),
    WithJsonSchema({"type": "string", "pattern": "^([Aa][Uu][Tt][Oo]|[Cc][Pp][Uu]|[Cc][Uu][Dd][Aa](:[0-9]+)?)$"}),
]
Memory = Annotated[
    str, BeforeValidator(_memory), WithJsonSchema({"type": ["string", "integer"], "pattern": "^ *[0-9]"})
]
GranularityName = Annotated[
    names.Granularity, BeforeValidator(choice(names.GRANULARITIES)), schema(names.GRANULARITIES)
]
HighPrecisionName = Annotated[
    names.HighPrecision, BeforeValidator(choice(names.HIGH_PRECISIONS)), schema(names.HIGH_PRECISIONS)
]
ModeName = Annotated[names.Mode, BeforeValidator(choice(names.MODES)), schema(names.MODES)]
FormatName = Annotated[names.Format, BeforeValidator(choice(names.FORMATS)), schema(names.FORMATS)]
AccuracyLevel = Annotated[
    int, BeforeValidator(_accuracy_level), WithJsonSchema({"type": "integer", "minimum": 0, "maximum": 4})
]
PickName = Annotated[names.Pick, BeforeValidator(choice(names.PICKS)), schema(names.PICKS)]
Seed = Annotated[int, BeforeValidator(_seed), WithJsonSchema({"type": "integer", "minimum": 0})]
Folder = Annotated[str | None, BeforeValidator(_folder), WithJsonSchema({"type": "string", "minLength": 1})]
KernelCosts = Annotated[str, BeforeValidator(_kernel_costs), WithJsonSchema({"type": "string", "minLength": 1})]
Feedback = Annotated[
    dict[str, str],
    BeforeValidator(_feedback),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "string", "minLength": 1}}),
]
Pattern = Annotated[str, BeforeValidator(_pattern), WithJsonSchema({"type": "string", "minLength": 1})]
TensorPattern = Annotated[str, BeforeValidator(_tensor_pattern), WithJsonSchema({"type": "string", "minLength": 1})]
Patterns = Annotated[tuple[Pattern, ...], BeforeValidator(items), WithJsonSchema(_LIST_SCHEMA)]
TensorGroup = Annotated[tuple[TensorPattern, ...], BeforeValidator(items), WithJsonSchema(_LIST_SCHEMA)]
