"""``sbonnx view``: open the page of a report, or the graph of a model, in the browser."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sbonnx.cli import options
from sbonnx.cli.options import Arguments
from sbonnx.errors import DataError, RecipeError
from sbonnx.system.input_files import read_json
from sbonnx.system.terminal import map_strings, relative_paths

if TYPE_CHECKING:
    from sbonnx.graph import Graph
    from sbonnx.present.model_description import ModelView
    from sbonnx.present.text.printer import Printer
    from sbonnx.spec import Array

HELP: Final = (
    "Open a report or the graph of a model in the browser. The graph shows bits, ranges, and why nodes stay float; "
    "with data, layers are coloured by their loss."
)

FILE: Final = options.argument(
    "file", "FILE", "A model (float, or quantized by any tool), or the JSON of --report or --json of a verb."
)
QUANT: Final = options.optional_argument("quantized", "QUANT", "A quantized file of the float model FILE.")
OUTPUT: Final = replace(options.OUTPUT, help="The HTML file to write instead of a temporary one.")
EXPORT: Final = options.option(
    "--export netron|model-explorer",
    str,
    "Write what is known of the nodes for another viewer, to -o, and no page: a copy of the model with metadata "
    "(netron), or node data in JSON (model-explorer).",
)
NO_OPEN: Final = options.switch("--no-open", "Only write the page.")

OPTIONS: Final = (
    FILE,
    QUANT,
    options.DATA,
    options.BACKEND,
    options.RECIPE,
    *options.FEEDS,
    OUTPUT,
    EXPORT,
    NO_OPEN,
    options.FORCE,
    *options.COMMON,
)

KEYS: Final = {"counts", "metrics", "settings"}
"""Keys of the report of one model that the page needs; that of a batch has `rows`."""

VIEWERS: Final = ("netron", "model-explorer")

JSON: Final = ".json"

LARGEST: Final = 1 << 29
"""Maximum size of a report in bytes."""

FEEDS: Final = 8
"""Default number of feeds on which losses are measured."""


@dataclass(frozen=True)
class ViewOutput:
    """Output of view.

    Attributes:
        page: the file that was written: the page, or the overlay of --export.
        opened: whether a browser was opened.
    """

    page: str
    opened: bool


def run(given: Arguments) -> int:
    import tempfile
    import webbrowser

    from sbonnx import graph as graphs

    printer, file, output = given.printer(), given[FILE], given[OUTPUT]
    inputs = [Path(path) for path in (file, given[QUANT], given[options.DATA]) if path is not None]
    if output is not None:
        graphs.check_target(output, inputs=inputs, force=given[options.FORCE])
    if given[EXPORT] is not None:
        return _export(given, printer)
    page = _report_page(given) if file.suffix.lower() == JSON else _view(given).page()
    if output is None:
        folder = Path(tempfile.mkdtemp(prefix="sbonnx-view-"))  # remains: the browser reads it after the end
        output = folder / f"{(given[QUANT] or file).stem}.html"
    graphs.write_text(output, page)
    opened = False if given[NO_OPEN] else webbrowser.open(output.resolve().as_uri())
    printer.value("view", ViewOutput(str(output), opened))
    printer.line(f"written: {output}")
    if not (opened or given[NO_OPEN]):
        printer.note("no browser was found: open the file yourself")
    return 0


def _export(given: Arguments, printer: Printer) -> int:
    """Write an overlay for another viewer.

    Raises:
        RecipeError: the viewer is not known, the input is a report, or -o is missing.
    """
    from sbonnx import graph as graphs
    from sbonnx.present.overlays import model_explorer, write_netron

    viewer, output = given[EXPORT], options.required_output(given[OUTPUT])
    if viewer not in VIEWERS:
        raise RecipeError(f"--export '{viewer}' is not known: choose one of {', '.join(VIEWERS)}")
    if given[FILE].suffix.lower() == JSON:
        raise RecipeError(f"{given[FILE]} is a report: --export applies to models")
    view = _view(given)
    if viewer == "netron":
        write_netron(view, output, force=given[options.FORCE])
    else:
        graphs.write_text(output, model_explorer(view))
    printer.value("view", ViewOutput(str(output), False))
    printer.line(f"written: {output}")
    return 0


def _report_page(given: Arguments) -> str:
    """Render the page of a report.

    Raises:
        DataError: the file cannot be read, or is no report.
        RecipeError: an option applies to models only.
    """
    from sbonnx.batch.jobs.job import BatchReport
    from sbonnx.present.html import batch_page, single_page
    from sbonnx.report import Report

    file = given[FILE]
    if any((given[QUANT], given[options.DATA], given[options.BACKEND], given[options.RECIPE])):
        raise RecipeError(f"{file} is a report: QUANT, --data, --backend and --recipe apply to models; leave them out")
    try:
        report = read_json(file, LARGEST)
    except OSError as error:
        raise DataError(f"the report '{file}' cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise DataError(f"the report '{file}' is no JSON: write it with --report FILE.json") from error
    if isinstance(report, Mapping) and report.keys() >= KEYS:
        return _rendered(Report, single_page, report, file)
    if isinstance(report, Mapping) and "rows" in report and "title" in report:
        return _rendered(BatchReport, batch_page, map_strings(relative_paths, report), file)
    raise DataError(f"'{file}' is no report of quantize, qat or batch: write it with --report FILE.json")


def _rendered(kind: Any, render: Any, report: Mapping[str, Any], file: Path) -> str:
    from sbonnx.report.reading import read

    try:
        page: str = render(read(kind, report))
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, RecursionError) as error:
        raise DataError(f"the report '{file}' is not complete, or of another version: write it again") from error
    return page


def _view(given: Arguments) -> ModelView:
    """Describe a model: of a float one, what a recipe would quantize; of a quantized one, its pairs.

    Raises:
        RecipeError: options that exclude each other.
        ModelError: a file cannot be read.
    """
    from sbonnx.calib.data import dataset as datasets
    from sbonnx.present.model_description import view_of

    def feeds(graph: Graph) -> Iterable[Mapping[str, Array]]:
        limit = given[options.SAMPLES] or FEEDS
        return datasets.read(given.required_data(), graph, split=given[options.SPLIT], limit=limit)

    return view_of(
        given[FILE],
        given[QUANT],
        None if given[options.DATA] is None else feeds,
        backend=given[options.BACKEND],
        recipe=given[options.RECIPE],
        device=given[options.DEVICE] or "cpu",
    )
