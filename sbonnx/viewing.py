"""``view``: the page of a report, or the graph of a model, in the browser."""

from __future__ import annotations

import os
import tempfile
import webbrowser
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeGuard

from sbonnx import graph as graphs
from sbonnx.api.arguments import File, feeds_of, known_keywords, model_files, reading
from sbonnx.batch.jobs.job import BatchReport
from sbonnx.calib.data import Preprocessing
from sbonnx.errors import DataError, OutputError, RecipeError
from sbonnx.graph.storage.model_file import ModelSource
from sbonnx.present.html import batch_page, single_page
from sbonnx.present.model_description import ModelView, view_of
from sbonnx.present.overlays import model_explorer, write_netron
from sbonnx.report import Report
from sbonnx.report.notebook import Result
from sbonnx.report.pruned import PruningReport
from sbonnx.report.reading import read
from sbonnx.system.input_files import read_json
from sbonnx.system.terminal import map_strings, relative_paths
from sbonnx.verify.runtimes import CPU

REPORTS: Final = (Report, PruningReport, BatchReport)
"""Results that are pages."""

KEYS: Final = {Report: {"counts", "metrics", "settings"}, PruningReport: {"dimensions", "macs", "metrics"}}
"""Keys of the reports of one model by which their JSON is recognized; that of a batch has `rows`."""

VERBS: Final = "quantize, qat, prune or batch"

VIEWERS: Final = ("netron", "model-explorer")

JSON: Final = ".json"

LARGEST: Final = 1 << 29
"""Maximum size of a report in bytes."""

FEEDS: Final = 8
"""Default number of feeds on which losses are measured."""


@dataclass(frozen=True, repr=False)
class WrittenPage(Result):
    """An HTML page.

    Attributes:
        page: the file that was written: the page, or the overlay of --export.
        opened: whether a browser was opened.
    """

    page: str
    opened: bool


@known_keywords
def view(
    file: ModelSource | Report | PruningReport | BatchReport,
    quantized: ModelSource | None = None,
    *,
    data: Any = None,
    backend: str | None = None,
    recipe: Any = None,
    preprocess: Preprocessing | None = None,
    split: int | None = None,
    samples: int | None = None,
    device: str = CPU,
    output: File | None = None,
    export: str | None = None,
    open: bool = True,
    force: bool = False,
) -> WrittenPage:
    """Open a report or the graph of a model in the browser. With data, layers are coloured by their loss.

    Args:
        file: a model (float, or quantized by any tool), as path or in memory; or a report, also as path of its JSON.
        quantized: quantized form of the float model, as path or in memory.
        data: feeds on which losses are measured, as calibration data of `sbonnx.quantize`; None: no losses.
        backend, recipe: of a float model, what is planned, see `sbonnx.quantize`.
        preprocess, split: see `sbonnx.quantize`.
        samples: number of feeds; None: 8.
        device: "cpu", "cuda" or "auto".
        output, force: path of the HTML file, and whether to overwrite a file; None: a temporary one.
        export: write what is known of the nodes to `output` for another viewer, and no page: "netron" (a copy of the
            model with metadata) or "model-explorer" (node data in JSON).
        open: open it in a browser.

    Raises:
        SbonnxError: a subclass, for every error that the user can fix.
    """
    target = None if output is None else Path(output)
    _check_export(export, file, target)
    with reading(file, quantized, data, recipe):
        if target is not None:
            graphs.check_target(target, inputs=(), force=force)
        if isinstance(file, REPORTS):
            stem, page = "report", batch_page(file) if isinstance(file, BatchReport) else single_page(file)
        elif _is_json(file):
            if any(value is not None for value in (quantized, data, backend, recipe)):
                raise RecipeError(
                    f"{file} is a report: QUANT, --data, --backend and --recipe apply to models; leave them out"
                )
            stem, page = Path(file).stem, _report_page(Path(file))
        else:
            feeds = None
            if data is not None:
                feeds = partial(feeds_of, data, preprocess=preprocess, split=split, samples=samples or FEEDS)
            with model_files(*([file] if quantized is None else [file, quantized])) as (files, _):
                second = None if quantized is None else files[1]
                shown = view_of(files[0], second, feeds, backend=backend, recipe=recipe, device=device)
                if export is not None and target is not None:
                    return _exported(shown, export, target, force=force)
                stem, page = files[-1].stem, shown.page()
        if target is None:
            folder = Path(tempfile.mkdtemp(prefix="sbonnx-view-"))  # remains: the browser reads it after the end
            target = folder / f"{stem}.html"
        graphs.write_text(target, page)
    return WrittenPage(str(target), open and webbrowser.open(target.resolve().as_uri()))


def _is_json(file: object) -> TypeGuard[File]:
    """Whether a path is that of the JSON of a report."""
    return isinstance(file, (str, os.PathLike)) and Path(file).suffix.lower() == JSON


def _check_export(viewer: str | None, file: object, output: Path | None) -> None:
    """Check the arguments of an overlay.

    Raises:
        RecipeError: the viewer is not known, or the input is a report.
        OutputError: there is no output.
    """
    if viewer is None:
        return
    if output is None:
        raise OutputError("-o is missing: name the file to write, such as -o model.int8.onnx")
    if viewer not in VIEWERS:
        raise RecipeError(f"--export '{viewer}' is not known: choose one of {', '.join(VIEWERS)}")
    if isinstance(file, REPORTS) or _is_json(file):
        raise RecipeError(f"{file} is a report: --export applies to models")


def _exported(shown: ModelView, viewer: str, output: Path, *, force: bool) -> WrittenPage:
    if viewer == "netron":
        write_netron(shown, output, force=force)
    else:
        graphs.write_text(output, model_explorer(shown))
    return WrittenPage(str(output), False)


def _report_page(file: Path) -> str:
    """Render the page of a report.

    Raises:
        DataError: the file cannot be read, or is no report.
    """
    try:
        report = read_json(file, LARGEST)
    except FileNotFoundError as error:
        written = f"--report {file.name} of {VERBS} writes one"
        raise DataError(f"the report '{file}' does not exist: check the path ({written})") from error
    except OSError as error:
        raise DataError(f"the report '{file}' cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise DataError(f"the report '{file}' is no JSON: write it with --report FILE.json") from error
    for kind, keys in KEYS.items():
        if isinstance(report, Mapping) and report.keys() >= keys:
            return _rendered(kind, single_page, report, file)
    if isinstance(report, Mapping) and "rows" in report and "title" in report:
        return _rendered(BatchReport, batch_page, map_strings(relative_paths, report), file)
    raise DataError(f"'{file}' is no report of {VERBS}: write it with --report FILE.json")


def _rendered(kind: Any, render: Any, report: Mapping[str, Any], file: Path) -> str:
    try:
        page: str = render(read(kind, report))
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, RecursionError) as error:
        raise DataError(f"the report '{file}' is not complete, or of another version: write it again") from error
    return page
