"""Record of the constants that equalization changed, from which the float weights of a written file are known.

Equalization moves scales between constants and leaves the function of a graph unchanged, so the rounded weights of the
file are those of other float weights than the model has. The record is in the metadata of the file.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np

from sbonnx.errors import ModelError
from sbonnx.graph.storage import packed_json

KEY: Final = "sbonnx.equalized"
"""Key of the record in the metadata of a model."""

EMPTY: Final = np.ones(0, np.float32)

Kind = Literal["channels", "times", "repeat", "is"]


@dataclass(frozen=True)
class ConstantEdit:
    """One change of a constant.

    Attributes:
        kind: "channels": the weight of a linear op times `inputs` and over `outputs`, one number a channel, empty: 1.
            "times": times `values`, which broadcast to it. "repeat": `values` are indices along `axis`. "is": the
            constant became `values`.
        values, axis, inputs, outputs: by kind.
    """

    kind: Kind
    values: Any = field(default_factory=lambda: EMPTY)
    axis: int = 0
    inputs: Any = field(default_factory=lambda: EMPTY)
    outputs: Any = field(default_factory=lambda: EMPTY)


Edits = dict[str, tuple[ConstantEdit, ...]]
"""Changes in order, by name of the constant in the equalized graph."""


def added_bias(node: str) -> str:
    """Return the name that the bias of a node gets which had none."""
    return f"{node}.bias"


def to_metadata(edits: Mapping[str, tuple[ConstantEdit, ...]]) -> dict[str, str]:
    """Return the entry of a model's metadata; none without changes."""
    if not edits:
        return {}
    rows = {name: [_row(constant_edit) for constant_edit in some] for name, some in sorted(edits.items())}
    return {KEY: packed_json.pack(json.dumps(rows, separators=(",", ":")))}


def from_metadata(metadata: Mapping[str, str]) -> Edits:
    """Read the record; empty if there is none.

    Raises:
        ModelError: it is damaged.
    """
    if KEY not in metadata:
        return {}
    try:
        return {name: tuple(map(_edit, rows)) for name, rows in packed_json.unpack(metadata[KEY]).items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"the metadata '{KEY}' cannot be read ({error}): write the file again") from error


def _row(edit: ConstantEdit) -> dict[str, Any]:
    row: dict[str, Any] = {"kind": edit.kind, "axis": edit.axis}
    for name in ("values", "inputs", "outputs"):
        array = np.asarray(getattr(edit, name))
        if array.size:
            kind = "<i8" if edit.kind == "repeat" else "<f4"
            row[name] = {"shape": list(array.shape), "data": base64.b64encode(array.astype(kind).tobytes()).decode()}
    return row


def _edit(row: Mapping[str, Any]) -> ConstantEdit:
    kind = "<i8" if row["kind"] == "repeat" else "<f4"
    arrays = {
        name: np.frombuffer(base64.b64decode(row[name]["data"]), kind).reshape(row[name]["shape"])
        for name in ("values", "inputs", "outputs")
        if name in row
    }
    return ConstantEdit(row["kind"], axis=int(row["axis"]), **arrays)
