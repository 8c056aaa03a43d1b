"""Measurements of a float network for pruning, and their cache: one measurement serves several budgets."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from sbonnx.calib.cache.data_digest import data_digest
from sbonnx.calib.cache.sketch_cache import PRUNING
from sbonnx.calib.engine.runner import settings
from sbonnx.calib.engine.samples import Samples
from sbonnx.errors import OutputError
from sbonnx.graph import Graph
from sbonnx.graph.digests import combined, outputs_digest, text
from sbonnx.graph.storage.output_files import write_bytes
from sbonnx.pruning.curves import SensitivityCurve
from sbonnx.report import Refusal
from sbonnx.report.reading import read
from sbonnx.version import __version__

FORMAT: Final = 1
"""Format of the files. It is part of their names."""


@dataclass(frozen=True)
class Measurement:
    """Result of running a float network and its variants on data.

    Attributes:
        orders: groups of each dimension that can be removed together, in the order of removal.
        curves: sensitivity curve of each dimension; none if the numbers of channels do not follow from curves.
        sizes: see `sbonnx.pruning.float_pass.measured_sizes`.
        refusals: layers without moments.
    """

    orders: tuple[tuple[int, ...], ...]
    curves: tuple[SensitivityCurve, ...]
    sizes: Mapping[str, float]
    refusals: tuple[Refusal, ...]


class MeasurementCache:
    """Files with measurements in the folder `PRUNING` of a calibration cache, named by digests of what they depend on.

    Files are written atomically and have a checksum: damaged ones are measured again.

    Args:
        samples: what is measured on; without a folder of the cache, nothing is cached.
    """

    def __init__(self, samples: Samples) -> None:
        cache = samples.options.cache
        self._folder = None if cache is None else Path(cache) / PRUNING
        self._data = "" if self._folder is None else data_digest(samples.data)
        self._settings = sorted(settings(samples.options.device).items())

    def get(self, graph: Graph, depends_on: Sequence[object], measure: Callable[[], Measurement]) -> Measurement:
        """Return the measurement of a graph from the cache, or measure and store it.

        Args:
            graph: the measured network.
            depends_on: all other settings of the measurement, as values with an unambiguous `repr`.

        Raises:
            OutputError: the folder cannot be written to.
        """
        if self._folder is None:
            return measure()
        names = [node.name for node in graph.nodes]
        parts = [FORMAT, __version__, self._data, self._settings, names, *depends_on]
        key = text(combined("pruning", outputs_digest(graph).encode(), *(repr(part).encode() for part in parts)))
        file = self._folder / f"{key}.json"
        measured = _read(file)
        if measured is None:
            measured = measure()
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise OutputError(
                    f"'{self._folder}' cannot be a folder of the calibration cache ({error.strerror or error}): name a "
                    "cache that can be written to"
                ) from error
            write_bytes(file, _packed(measured))
        return measured


KIND: Final = "measurement with codes of refusals"
"""Part of the checksum of a file: another form has another kind."""


def _packed(found: Measurement) -> bytes:
    values = {
        "orders": found.orders,
        "curves": [[curve.counts, curve.errors] for curve in found.curves],
        "sizes": dict(found.sizes),
        "refusals": [asdict(refusal) for refusal in found.refusals],
    }
    content = json.dumps(values).encode()
    return text(combined(KIND, content)).encode() + b"\n" + content


def _read(file: Path) -> Measurement | None:
    """Read a file; None if it is missing or damaged."""
    try:
        checksum, _, content = file.read_bytes().partition(b"\n")
    except OSError:
        return None
    if checksum != text(combined(KIND, content)).encode():
        return None
    values: dict[str, Any] = json.loads(content)
    return Measurement(
        tuple(map(tuple, values["orders"])),
        tuple(SensitivityCurve(tuple(counts), tuple(errors)) for counts, errors in values["curves"]),
        values["sizes"],
        tuple(read(Refusal, row) for row in values["refusals"]),
    )
