"""Labels in data: the items of a feed that are no inputs of the model."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from sbonnx.calib.data.stored_arrays import StoredArray
from sbonnx.calib.data.validate import InputSpec, as_array, by_position
from sbonnx.metrics.boxes import CATEGORIES, Categories
from sbonnx.report.codes import Note

LABEL: Final = "label"
"""Name of a label that the data does not name: an item past the inputs, a class folder, a row of labels.csv."""

LABELS_NOT_USED: Final = "labels-not-used"
"""Code of the note that calibration does not use labels."""


@dataclass(frozen=True)
class LabelledFeed:
    """One feed with its labels. Readers may yield it as a raw feed, `Dataset.labelled` yields it checked.

    Attributes:
        feed: arrays by input name; in a raw feed, any form that a feed may have.
        labels: labels by name: arrays (with the batch as the leading axis where they belong to samples) or any other
            values, such as text or decoded JSON. Calibration ignores them.
    """

    feed: Any
    labels: Mapping[str, Any] = field(default_factory=dict)


class ClassNumber(int):
    """Number of a class that is the position of its name among the sorted names of the data.

    Attributes:
        categories: the names.
    """

    categories: Categories

    def __new__(cls, number: int, categories: Categories) -> ClassNumber:
        """Return the number with the names."""
        label = super().__new__(cls, number)
        label.categories = categories
        return label


@dataclass(frozen=True)
class Naming:
    """Arrays of the feeds that are inputs of the model; decided by the first feed, equal for all.

    Attributes:
        inputs: inputs of the model.
        constants: names of inputs with a default, which are no labels.
        alias: name that the data uses for the only required input, if it is not the name in the model; "": none.
        note: a sentence if something is renamed, or ignored by calibration.
    """

    inputs: Sequence[InputSpec]
    constants: Container[str]
    alias: str
    note: Note | None

    def separate(self, raw: Any) -> LabelledFeed:
        """Separate the inputs of a raw feed from its labels.

        Arrays of a mapping whose names no input has, and items of a tuple past the last input, are labels; in a pair
        (mapping, label), so is the second item.
        """
        if isinstance(raw, LabelledFeed):
            return raw
        if isinstance(raw, Mapping):
            return self._from_mapping(raw)
        if isinstance(raw, (list, tuple)):
            if len(raw) == 2 and isinstance(raw[0], Mapping):
                inner = self._from_mapping(raw[0])
                given = raw[1] if isinstance(raw[1], Mapping) else {LABEL: raw[1]}
                return LabelledFeed(inner.feed, {**inner.labels, **given})
            return LabelledFeed(raw, _unnamed(raw[len(by_position(self.inputs, len(raw))) :]))
        return LabelledFeed(raw)

    def _from_mapping(self, raw: Mapping[Any, Any]) -> LabelledFeed:
        extra = _extra(raw, self.inputs, self.constants)
        if not extra:
            return LabelledFeed(raw)
        if all(str(name) == f"arr_{place}" for place, name in enumerate(raw)):
            pairs, count = list(raw.items()), len(by_position(self.inputs, len(raw)))
            return LabelledFeed(dict(pairs[:count]), _unnamed([value for _, value in pairs[count:]]))
        missing = _missing(raw, self.inputs)
        if missing:  # not under its other name: `named` raises the error
            return LabelledFeed({missing[0]: raw[self.alias]} if self.alias in raw else raw)
        feed = {name: value for name, value in raw.items() if name not in extra}
        return LabelledFeed(feed, {str(name): raw[name] for name in extra})


def naming_of(raw: Any, inputs: Sequence[InputSpec], constants: Container[str] = ()) -> Naming:
    """Return the naming that the first feed implies: a single array is the only required input under any name."""
    first = raw[0] if isinstance(raw, (list, tuple)) and len(raw) == 2 and isinstance(raw[0], Mapping) else raw
    alias, note = "", None
    extra = _extra(first, inputs, constants) if isinstance(first, Mapping) else []
    if extra and extra != ["arr_0"]:
        missing, names = _missing(first, inputs), ", ".join(f"'{name}'" for name in extra)
        if missing and len(first) == sum(not spec.optional for spec in inputs) == 1:
            alias, note = (
                str(extra[0]),
                Note("array-renamed", f"array {names} of the data is taken as input '{missing[0]}'"),
            )
        elif not missing:
            words = "array {} of the data is no input" if len(extra) == 1 else "arrays {} of the data are no inputs"
            note = Note("labels-not-used", f"{words.format(names)} of the model: labels, not used for calibration")
    return Naming(inputs, constants, alias, note)


def _extra(raw: Mapping[Any, Any], inputs: Sequence[InputSpec], constants: Container[str]) -> list[Any]:
    names = {spec.name for spec in inputs}
    return [name for name in raw if str(name) not in names and name not in constants]


def _missing(raw: Mapping[Any, Any], inputs: Sequence[InputSpec]) -> list[str]:
    return [spec.name for spec in inputs if spec.name not in raw and not spec.optional]


def _unnamed(values: Sequence[Any]) -> dict[str, Any]:
    return {LABEL if number == 0 else f"{LABEL}_{number}": value for number, value in enumerate(values)}


def batched_labels(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the labels of samples as one array (numbers) or list by name, of those names that all samples have.

    The names behind `ClassNumber` are added as `CATEGORIES`.
    """
    batch: dict[str, Any] = {}
    for name in samples[0] if samples else ():
        if all(name in labels for labels in samples):
            values = [labels[name] for labels in samples]
            plain = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
            batch[name] = np.array(values) if plain else values
            if all(isinstance(value, ClassNumber) for value in values):
                batch[CATEGORIES] = [value.categories for value in values]
    return batch


def cut_labels(labels: Mapping[str, Any], total: int, start: int, stop: int) -> dict[str, Any]:
    """Return the labels of samples `start` to `stop` of a feed of `total` samples; other labels whole."""
    return {name: value[start:stop] if _length(value) == total else value for name, value in labels.items()}


def loaded_labels(labels: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Read labels that are stored in files, and convert tensors of other libraries to numpy arrays.

    Raises:
        DataError: an array cannot be read.
    """
    return {
        name: as_array(value, f"'{name}' of {where}")
        if isinstance(value, StoredArray) or hasattr(value, "detach")
        else value
        for name, value in labels.items()
    }


def _length(value: Any) -> int | None:
    shape = getattr(value, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    return len(value) if isinstance(value, (list, tuple)) else None
