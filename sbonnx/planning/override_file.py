"""Per-tensor quantization overrides, as JSON in the form of onnxruntime's quantization tools.

    {"tensor": [{"quant_type": "QUInt16", "scale": 0.01, "zero_point": 3, "convert": {"quant_type": "QUInt8"}}]}

A list has one entry for a tensor, or one for each channel of a weight, the first with "axis". Numbers may be texts, as
``json.dumps(..., default=str)`` of `TensorQuantOverridesHelper` writes them.

Source: onnxruntime.quantization.tensor_quant_overrides, get_qnn_qdq_config.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sbonnx.errors import RecipeError
from sbonnx.spec import QuantSpec
from sbonnx.system.input_files import read_json

TYPES: Final[Mapping[str, tuple[int, bool]]] = {
    "QInt8": (8, True),
    "QUInt8": (8, False),
    "QInt16": (16, True),
    "QUInt16": (16, False),
}
"""Bits and sign by the name in onnxruntime's `QuantType`."""

KEYS: Final = frozenset(
    {"quant_type", "axis", "scale", "zero_point", "symmetric", "reduce_range", "rmin", "rmax", "convert", "recv_nodes"}
)

EXCLUDED_BY_SCALE: Final = ("symmetric", "reduce_range", "rmin", "rmax")


@dataclass(frozen=True)
class TensorOverride:
    """Override of one tensor.

    Attributes:
        bits, signed: of its type; None: not set.
        symmetric: whether the range is symmetric; None: not set.
        axis: channel axis of a weight, negative from the end; None: one scale.
        scale, zero_point: of the tensor or of each channel; empty: not set.
        ranges: lowest and highest value of the tensor or of each channel; empty: not set.
        reduce_range: a weight gets one bit less.
        convert: type that readers get, converted from that of the tensor.
        readers: names of the nodes that get the converted type; None: all.
    """

    bits: int | None = None
    signed: bool | None = None
    symmetric: bool | None = None
    axis: int | None = None
    scale: tuple[float, ...] = ()
    zero_point: tuple[int, ...] = ()
    ranges: tuple[tuple[float, float], ...] = ()
    reduce_range: bool = False
    convert: TensorOverride | None = None
    readers: frozenset[str] | None = None


def type_name(spec: QuantSpec) -> str:
    """Return the name of a type in onnxruntime's `QuantType`."""
    return next(name for name, storage in TYPES.items() if storage == (spec.storage_bits, spec.signed))


def read_overrides(path: str | Path) -> dict[str, TensorOverride]:
    """Read a file of overrides, by tensor.

    Raises:
        RecipeError: the file cannot be read, or is no such file; the message names tensor, key and value.
    """
    try:
        value = read_json(path)
    except (OSError, ValueError) as error:
        raise RecipeError(f"TENSOR_OVERRIDES: '{path}' cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise RecipeError(f"TENSOR_OVERRIDES: '{path}' is no mapping of tensor names to lists of overrides")
    overrides = {}
    for tensor, rows in value.items():
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise RecipeError(f"TENSOR_OVERRIDES: '{tensor}' in '{path}' is no list of mappings")
        if rows and any(rows):
            try:
                overrides[tensor] = _override(rows)
            except ValueError as error:
                raise RecipeError(f"TENSOR_OVERRIDES: '{tensor}' in '{path}': {error}") from error
    return overrides


def _override(rows: Sequence[Mapping[str, Any]]) -> TensorOverride:
    first = rows[0]
    unknown = [key for row in rows for key in row if key not in KEYS]
    if unknown:
        raise ValueError(f"key '{unknown[0]}' is not one of {', '.join(sorted(KEYS))}")
    if len(rows) > 1 and "axis" not in first:
        raise ValueError(f"{len(rows)} entries without 'axis' in the first")
    for field, partner in (("scale", "zero_point"), ("rmin", "rmax")):
        if any((field in row) != (partner in row) or (field in row) != (field in first) for row in rows):
            raise ValueError(f"'{field}' and '{partner}' are set together, in every entry or in none")
    clash = next((key for row in rows for key in EXCLUDED_BY_SCALE if "scale" in row and key in row), None)
    if clash is not None:
        raise ValueError(f"'{clash}' is invalid with 'scale' and 'zero_point'")
    bits, signed = _type(first["quant_type"]) if "quant_type" in first else (None, None)
    for row in rows[1:]:
        if row.get("quant_type", first.get("quant_type")) != first.get("quant_type"):
            raise ValueError("its channels have different types")
    converted = first.get("convert")
    if converted is not None and (not isinstance(converted, dict) or "quant_type" not in converted):
        raise ValueError("'convert' is no mapping with 'quant_type'")
    nodes = None if converted is None else converted.get("recv_nodes")
    return TensorOverride(
        bits=bits,
        signed=signed,
        symmetric=_flag(first, "symmetric"),
        axis=int(_number(first, "axis")) if "axis" in first else None,
        scale=tuple(_number(row, "scale") for row in rows if "scale" in row),
        zero_point=tuple(int(_number(row, "zero_point")) for row in rows if "scale" in row),
        ranges=tuple((_number(row, "rmin"), _number(row, "rmax")) for row in rows if "rmin" in row),
        reduce_range=bool(_flag(first, "reduce_range")),
        convert=None if converted is None else _override([converted]),
        readers=None if nodes is None else frozenset(_names(nodes)),
    )


def _type(name: object) -> tuple[int, bool]:
    wanted = str(name).rpartition(".")[2].lower()
    storage = next((kind for label, kind in TYPES.items() if label.lower() == wanted), None)
    if storage is None:
        raise ValueError(f"quant_type is one of {', '.join(TYPES)}, got '{name}'")
    return storage


def _names(nodes: object) -> list[str]:
    """Return names from a list, or from the text of a set, as ``str`` writes it."""
    if isinstance(nodes, str):
        nodes = [part.strip().strip("'\"") for part in nodes.strip("{}[]() ").split(",")]
    if not isinstance(nodes, list) or not all(isinstance(name, str) for name in nodes):
        raise ValueError(f"'recv_nodes' is no list of node names, got {nodes!r}")
    return [name for name in nodes if name]


def _flag(row: Mapping[str, Any], key: str) -> bool | None:
    value = row.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"'{key}' is true or false, got {value!r}")
    return value


def _number(row: Mapping[str, Any], key: str) -> float:
    value = row[key]
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"'{key}' is a number, got {value!r}") from None
    least = 0.0 if key == "scale" else -float("inf")
    if not least < number < float("inf") or (key in ("axis", "zero_point") and number != int(number)):
        raise ValueError(f"'{key}' cannot be {value!r}")
    return number
