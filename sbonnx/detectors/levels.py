"""Heads with outputs for each level and quantity: which output is which, by cells, columns and operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from sbonnx.detectors.head_structure import BOX_SIDES, distance_unit, ends_in
from sbonnx.detectors.outputs import DetectorOutputs, cells
from sbonnx.spec import Array

LANDMARKS: Final = 10
"""Columns of the five landmarks of a face."""

FPN: Final = (8, 16, 32, 64, 128)
"""Strides of the levels P3 to P7 of FCOS and RetinaNet."""

FCOS_ROWS: Final = ("distances", "centerness", "scores")
RETINA_ROWS: Final = ("distances", "scores")
"""Quantities of raw FCOS and RetinaNet of torchvision, see `rows_of_levels`."""

RETINA_ANCHORS: Final = 9
"""Anchors of a cell of RetinaNet: three sizes, three shapes."""

Quantities = Callable[[DetectorOutputs, Mapping[str, Array]], dict[str, str] | None]


@dataclass(frozen=True)
class LevelForm:
    """Form of a head with outputs for each level.

    Attributes:
        quantities: returns the names of the outputs of a level by quantity; None if they are others.
        strides: possible strides of the levels.
        anchors: number of rows of a cell.
        decisive: whether no other head has this structure; else the user has to state it.
    """

    quantities: Quantities
    strides: tuple[tuple[int, ...], ...]
    anchors: int = 1
    decisive: bool = True


def levels_of(outputs: DetectorOutputs, head: str) -> list[tuple[int, dict[str, str]]] | None:
    """Return stride and names of the outputs, by quantity, of each level of a head of `LEVELS`; None: it does not fit.

    Every output belongs to a level, by its number of cells, and a quantity, by its number of columns and the operators
    behind it.
    """
    form = LEVELS[head]
    return next((levels for strides in form.strides if (levels := _of_strides(outputs, form, strides))), None)


def _of_strides(
    outputs: DetectorOutputs, form: LevelForm, strides: tuple[int, ...]
) -> list[tuple[int, dict[str, str]]] | None:
    rows, levels, used = outputs.rows(), [], 0
    for stride in strides:
        count = form.anchors * cells(outputs.size, (stride,))
        level = {name: value for name, value in rows.items() if value.shape[1] == count}
        names = form.quantities(outputs, level)
        if names is None:
            return None
        used += len(level)
        levels.append((stride, names))
    same = {tuple(rows[name].shape[2] for name in names.values()) for _, names in levels}
    return levels if used == len(outputs.arrays) and len(same) == 1 else None


def rows_of_levels(outputs: DetectorOutputs, quantities: tuple[str, ...], anchors: int) -> dict[str, str] | None:
    """Return the names of outputs (images, N, columns) by quantity, with rows for all cells of the strides of `FPN`.

    Args:
        quantities: "distances" (4 columns), "centerness" (1) and at the end "scores" (the other output). Of several
            outputs with this number of columns, the last has the quantity.
        anchors: number of rows of a cell.
    """
    rows = outputs.of_rank(3)
    count = anchors * cells(outputs.size, FPN)
    if (
        len(quantities) != len(rows)
        or len(rows) != len(outputs.arrays)
        or any(value.shape[1] != count for value in rows.values())
    ):
        return None
    columns, names = {"distances": BOX_SIDES, "centerness": 1}, dict[str, str]()
    for quantity in quantities:
        wanted = columns.get(quantity)
        fits = [name for name in rows if name not in names.values() and wanted in (None, rows[name].shape[2])]
        if not fits:
            return None
        names[quantity] = fits[-1]
    return names


def _scores_and_distances(outputs: DetectorOutputs, level: Mapping[str, Array]) -> dict[str, str] | None:
    scores = [name for name in level if ends_in(outputs.tensor(name), "Sigmoid")]
    distances = [name for name, value in level.items() if name not in scores and value.shape[2] % BOX_SIDES == 0]
    fits = len(level) == 2 and len(scores) == len(distances) == 1 and level[distances[0]].shape[2] > BOX_SIDES
    return {"scores": scores[0], "distances": distances[0]} if fits else None


def _class_object_box(outputs: DetectorOutputs, level: Mapping[str, Array]) -> dict[str, str] | None:
    """Return class and object score (which of them is which does not matter), and boxes; landmarks are not needed."""
    columns = {name: value.shape[2] for name, value in level.items()}
    shares = [name for name, count in columns.items() if count == 1 and ends_in(outputs.tensor(name), "Sigmoid")]
    if sorted(columns.values()) != [1, 1, BOX_SIDES, LANDMARKS] or len(shares) != 2:
        return None
    return {"class": shares[0], "object": shares[1], "boxes": _with_columns(level, BOX_SIDES)[0]}


def _face_and_box(outputs: DetectorOutputs, level: Mapping[str, Array]) -> dict[str, str] | None:
    """Return scores and distances of faces; landmarks may be there and are not needed."""
    columns = sorted(value.shape[2] for value in level.values())
    if columns not in ([1, BOX_SIDES], [1, BOX_SIDES, LANDMARKS]):
        return None
    (scores,), (distances,) = _with_columns(level, 1), _with_columns(level, BOX_SIDES)
    return {"scores": scores, "distances": distances} if ends_in(outputs.tensor(scores), "Sigmoid") else None


def _class_center_box(outputs: DetectorOutputs, level: Mapping[str, Array]) -> dict[str, str] | None:
    """Return scores of classes, centerness and distances. Of one class, it does not matter which score is which."""
    distances = _with_columns(level, BOX_SIDES)
    if len(distances) > 1:
        distances = [name for name in distances if distance_unit(outputs.tensor(name)) is not None]
    if len(level) != 3 or len(distances) != 1:
        return None
    scores = sorted((name for name in level if name != distances[0]), key=lambda name: -level[name].shape[2])
    if level[scores[1]].shape[2] != 1:
        return None
    return {"scores": scores[0], "centerness": scores[1], "distances": distances[0]}


def _class_and_box(outputs: DetectorOutputs, level: Mapping[str, Array]) -> dict[str, str] | None:
    """Return scores of classes and distances, of which a Sigmoid is none. Of 4 classes, the first output has scores."""
    distances = [name for name in _with_columns(level, BOX_SIDES) if not ends_in(outputs.tensor(name), "Sigmoid")]
    if len(level) != 2 or not distances:
        return None
    scores = next(name for name in level if name != distances[-1])
    return {"scores": scores, "distances": distances[-1]}


def _with_columns(level: Mapping[str, Array], columns: int) -> list[str]:
    return [name for name, value in level.items() if value.shape[2] == columns]


LEVELS: Final[Mapping[str, LevelForm]] = {
    "picodet": LevelForm(_scores_and_distances, ((8, 16, 32, 64), (8, 16, 32))),
    "yunet": LevelForm(_class_object_box, ((8, 16, 32),)),
    "scrfd": LevelForm(_face_and_box, ((8, 16, 32),), anchors=2),
    "fcos": LevelForm(_class_center_box, (FPN,)),
    "rtmdet": LevelForm(_class_and_box, ((8, 16, 32),), decisive=False),
}
