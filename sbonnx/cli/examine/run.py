"""``sbonnx run``: run a model on data or on random inputs, and save its outputs."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sbonnx.cli import options
from sbonnx.cli.options import Arguments
from sbonnx.errors import DataError, OutputError

if TYPE_CHECKING:
    from sbonnx.graph import Graph
    from sbonnx.spec import Array
    from sbonnx.verify import Feeds

HELP: Final = "Run a model and save its outputs. On data, or on random inputs."

MODEL: Final = options.argument("model", "MODEL", "The ONNX model, float or quantized.")
DATA: Final = replace(options.DATA, help=f"{options.DATA.help} Without it, one feed is drawn at random.")
OUTPUT: Final = replace(
    options.OUTPUT,
    help="Where to write the outputs: FILE.npz (several feeds: joined along the leading axis), or a folder of one .npz "
    "per feed.",
)
SHAPE: Final = options.repeated(
    "--shape INPUT=DIMS", "Random inputs: shape of an input with dynamic axes, such as image=1x3x224x224"
)
BATCH: Final = options.setting("--batch N", 1, "Random inputs: size of dynamic leading axes.")
SEED: Final = options.setting("--seed N", 0, "Random inputs: seed of the values.")
RANDOM: Final = (SHAPE, BATCH, SEED)
"""Options of random inputs."""

OPTIONS: Final = (
    MODEL,
    DATA,
    OUTPUT,
    *options.FEEDS,
    *RANDOM,
    options.FORCE,
    options.ORT_LIBRARY,
    *options.COMMON_WITH_PROGRESS,
)


@dataclass(frozen=True)
class OutputStatistics:
    """Statistics of an output.

    Attributes:
        name, type: name and data type.
        shape: its shape; null if it varies.
        min, mean, max: of finite values; null without any.
        not_finite: number of other values.
    """

    name: str
    type: str | None
    shape: tuple[int, ...] | None
    min: float | None
    mean: float | None
    max: float | None
    not_finite: int


@dataclass(frozen=True)
class RunOutput:
    """Output of run.

    Attributes:
        model: the model.
        feeds: number of feeds.
        output: the file or folder; null: none.
        outputs: statistics by output.
    """

    model: str
    feeds: int
    output: str | None
    outputs: tuple[OutputStatistics, ...]


def run(given: Arguments) -> int:
    from sbonnx import graph as graphs
    from sbonnx import verify
    from sbonnx.verify.runtimes import exact_products
    from sbonnx.verify.sessions import output_names
    from sbonnx.verify.sessions import run as run_session

    printer, model, output = given.printer(), given[MODEL], given[OUTPUT]
    if output is not None:
        _check_output(output, [model], force=given[options.FORCE])
    graph = graphs.load(model, opset=1)
    count, feeds = _feeds(given, graph)
    session = verify.session(model, device=given[options.DEVICE] or "cpu", exact=exact_products(model))
    names = output_names(session)
    outputs = _Statistics(names)
    writer = (
        None if output is None else _FileWriter(output) if output.suffix.lower() == ".npz" else _FolderWriter(output)
    )
    progress = given.progress()
    try:
        progress.start("inference", count)
        for index, feed in enumerate(feeds):
            values = dict(zip(names, run_session(session, feed, index), strict=True))
            outputs.add(values)
            if writer is not None:
                writer.add(values)
            progress.advance()
        if writer is not None:
            writer.finish()
    finally:
        progress.close()
        if writer is not None:
            writer.close()
    rows = outputs.rows()
    printer.value("run", RunOutput(str(model), outputs.feeds, None if output is None else str(output), rows))
    printer.table(
        f"{model}: {outputs.feeds} {'feed' if outputs.feeds == 1 else 'feeds'}",
        ("output", "type", "shape", "min", "mean", "max", "not finite"),
        [
            (
                row.name,
                row.type,
                "varies" if row.shape is None else f"({', '.join(map(str, row.shape))})",
                *(row.min, row.mean, row.max),
                row.not_finite or None,
            )
            for row in rows
        ],
    )
    if output is not None:
        printer.line(f"written: {output}")
    return 0


def _feeds(given: Arguments, graph: Graph) -> tuple[int | None, Iterator[Feeds]]:
    """Return the number of feeds, if known, and the feeds."""
    source = given.data(DATA)
    if source is None:
        return 1, iter([random_feeds(given, graph, given[BATCH])])
    from sbonnx.calib.data import dataset as datasets

    data = datasets.read(source, graph, split=given[options.SPLIT], limit=given[options.SAMPLES])
    return data.count, iter(data)


def random_feeds(given: Arguments, graph: Graph, batch: int) -> Feeds:
    """Draw a feed by the options of `RANDOM`."""
    from sbonnx.calib.data.dataset import input_defaults, input_specs
    from sbonnx.calib.data.random_feeds import random_feed

    if batch < 1:
        raise DataError(f"--batch {batch}: a batch has 1 or more samples")
    defaults = input_defaults(graph)
    specs = [spec for spec in input_specs(graph) if spec.name not in defaults]
    return random_feed(specs, batch=batch, shapes=shapes_of(given[SHAPE] or ()), seed=given[SEED])


def shapes_of(texts: Any) -> dict[str, tuple[int, ...]]:
    """Parse ``INPUT=1x3x224x224`` into shapes by input.

    Raises:
        DataError: text of another form, or an input twice.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, equals, dims = text.rpartition("=")
        sizes = dims.replace(",", "x").split("x")
        if not equals or not name or not all(size.strip().isdecimal() for size in sizes):
            raise DataError(f"--shape is INPUT=DIMS, such as image=1x3x224x224, got '{text}'")
        if name in shapes:
            raise DataError(f"--shape gives input '{name}' two shapes")
        shapes[name] = tuple(int(size) for size in sizes)
    return shapes


class _Statistics:
    """Type, shape and range of each output over all feeds."""

    def __init__(self, names: list[str]) -> None:
        self.feeds = 0
        self._rows: dict[str, dict[str, Any]] = {name: {} for name in names}

    def add(self, outputs: dict[str, Any]) -> None:
        """Add the outputs of a feed."""
        self.feeds += 1
        for name, value in outputs.items():
            row = self._rows[name]
            shape = tuple(value.shape) if hasattr(value, "shape") else None
            row["shape"] = shape if row.get("shape", shape) == shape else None
            row["type"] = str(value.dtype) if hasattr(value, "dtype") else type(value).__name__
            if hasattr(value, "dtype") and value.dtype.kind in "fiub":
                self._add_values(row, value)

    @staticmethod
    def _add_values(row: dict[str, Any], value: Array) -> None:
        import numpy as np

        numbers = value.astype(np.float64, copy=False)
        finite = numbers[np.isfinite(numbers)]
        row["not_finite"] = row.get("not_finite", 0) + numbers.size - finite.size
        if finite.size:
            row["min"] = min(row.get("min", float("inf")), float(finite.min()))
            row["max"] = max(row.get("max", -float("inf")), float(finite.max()))
            row["sum"] = row.get("sum", 0.0) + float(finite.sum())
            row["count"] = row.get("count", 0) + finite.size

    def rows(self) -> tuple[OutputStatistics, ...]:
        """Return one row per output; statistics of finite values, None where there are none."""
        return tuple(
            OutputStatistics(
                name=name,
                type=row.get("type"),
                shape=row.get("shape"),
                min=row.get("min"),
                mean=row["sum"] / row["count"] if row.get("count") else None,
                max=row.get("max"),
                not_finite=row.get("not_finite", 0),
            )
            for name, row in self._rows.items()
        )


LONGEST_NAME: Final = (1 << 16) - 1
"""Bytes of a name in a zip archive."""


def _check_output(output: Path, inputs: list[Path], *, force: bool) -> None:
    from sbonnx import graph as graphs
    from sbonnx.graph.storage.output_files import check_outside_inputs

    check_outside_inputs(output)
    if output.suffix.lower() == ".npz":
        graphs.check_target(output, inputs=inputs, force=force)
    elif output.suffix and not output.is_dir():
        raise OutputError(f"-o {output}: outputs are written to FILE.npz, or to a folder without a suffix")
    elif output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise OutputError(f"'{output}' exists and is no empty folder: name another folder")
    elif not output.parent.is_dir():
        raise OutputError(f"there is no folder '{output.parent}' to write '{output.name}' to: create it first")


def _npz(arrays: dict[str, Any]) -> bytes:
    """Serialize arrays as .npz. `numpy.savez` cannot store every name, such as ``file``."""
    import zipfile

    import numpy as np

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, value in arrays.items():
            if not isinstance(value, np.ndarray) or value.dtype.kind == "O":
                raise OutputError(f"the output '{name}' is no array of numbers and cannot be saved in .npz: drop -o")
            if len(f"{name}.npy".encode()) > LONGEST_NAME:
                raise OutputError(f"the name of the output '{name[:40]}...' is too long for .npz: drop -o")
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, value, allow_pickle=False)
    return buffer.getvalue()


class _FileWriter:
    """One .npz: the outputs of all feeds, joined along the leading axis."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._parts: dict[str, list[Any]] = {}

    def add(self, outputs: dict[str, Any]) -> None:
        for name, value in outputs.items():
            self._parts.setdefault(name, []).append(value)

    def close(self) -> None:
        """Keep nothing: the file is written by `finish`."""

    def finish(self) -> None:
        import numpy as np

        from sbonnx.graph.storage.output_files import write_bytes

        arrays = {}
        for name, parts in self._parts.items():
            try:
                arrays[name] = parts[0] if len(parts) == 1 else np.concatenate(parts)
            except ValueError as error:
                raise OutputError(
                    f"the shapes of the output '{name}' differ from feed to feed and cannot be joined in one .npz: "
                    "give -o a folder"
                ) from error
        write_bytes(self._path, _npz(arrays))


class _FolderWriter:
    """A folder of one .npz per feed, which is also a form of data. It appears when all are written."""

    def __init__(self, path: Path) -> None:
        from sbonnx.graph.storage.temporary import temporary_folder

        self._path = path
        self._stack = ExitStack()
        self._folder = self._stack.enter_context(temporary_folder(next_to=path)) / path.name
        self._folder.mkdir()
        self._count = 0

    def add(self, outputs: dict[str, Any]) -> None:
        (self._folder / f"{self._count:05}.npz").write_bytes(_npz(outputs))
        self._count += 1

    def finish(self) -> None:
        self._folder.replace(self._path)

    def close(self) -> None:
        self._stack.close()
