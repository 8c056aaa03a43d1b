"""Model folders as transformers.js reads them: ``onnx/model.onnx`` and a file for each dtype, with the configuration.

The suffixes of file names and the entry of config.json that selects dtypes are those of `@huggingface/transformers`
(``src/utils/dtypes.js``, ``src/models/session.js``).
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sbonnx import graph as graphs
from sbonnx.api import create as api
from sbonnx.calib.data import with_preprocess
from sbonnx.calib.data.dataset import input_specs
from sbonnx.errors import ModelError, OutputError
from sbonnx.graph.storage.model_file import external_names
from sbonnx.graph.storage.output_folder import OutputFolder
from sbonnx.integrations.optimum import OTHER_WEIGHTS, SUBFOLDER, ModelFolder, chosen_data, processor_of, rows_as_feeds
from sbonnx.report import Note, Report
from sbonnx.report.outcome import FolderFile, QuantizedFolder

if TYPE_CHECKING:
    from sbonnx.recipe import Recipe

FLOAT: Final = "fp32"
SUFFIXES: Final = {FLOAT: "", "fp16": "_fp16", "q8": "_quantized", "q4": "_q4", "q4f16": "_q4f16"}
"""Ends of file names by dtype."""

CONFIG: Final = "config.json"
SELECTION: Final = "transformers.js_config"
"""Entry of config.json with defaults of transformers.js."""

EMPTY: Final = "no-tensor-quantized"
"""Code of the problem of a file that is float as before."""

RECORD: Final = "sbonnx_folder.json"
"""File with sizes and errors, by which an earlier output is recognized."""


def quantize_for_browser(
    folder: str | os.PathLike[str],
    data: Any,
    output: str | os.PathLike[str],
    recipe: Recipe,
    variants: Mapping[str, Mapping[str, Any] | None],
    *,
    max_download: int | None = None,
    force: bool = False,
    **settings: Any,
) -> QuantizedFolder:
    """Write a folder with the float model, its variants for a browser, configuration and tokenizer.

    Variants in which no tensor of a model can be quantized (q4 and q4f16 of convolutions alone) are left out.

    Args:
        folder: with config.json and ONNX files, in it or in its subfolder ``onnx``.
        data: calibration data, as `sbonnx.integrations.optimum.quantize_folder` takes it. Every file is compared with
            the float model on it.
        output: folder to create.
        recipe: of the dtype q8; the others have the defaults of `variants`.
        variants: recipe keys by dtype, see `sbonnx.backends.Files`.
        max_download: largest sum of bytes of the files of all models. For each model, the dtype is chosen with which
            the largest error of any model is smallest, and written into config.json. None: transformers.js chooses.
        force: replace an output folder of an earlier run.
        settings: of `sbonnx.quantize`.

    Raises:
        OutputError: no choice of files is small enough, or the folder cannot be written.
        ModelError: a model is larger than one file, which transformers.js reads only under other names.
    """
    source = ModelFolder.read(folder, tuple(filter(None, SUFFIXES.values())))
    by_model = {name: with_preprocess(feeds, processor_of(source, feeds)) for name, feeds in chosen_data(source, data)}
    inputs = list(source.models.values())
    target = OutputFolder(Path(output), source.folder, tuple(inputs), RECORD, force)
    reports: dict[str, Report] = {}
    files: list[FolderFile] = []
    notes: list[Note] = []
    with target.staged() as stage:
        (stage / SUBFOLDER).mkdir()
        for name, path in source.models.items():
            if external_names(path):
                raise ModelError(
                    f"'{path}' has external data, which is not supported for the web: give a smaller model"
                )
            place = stage / SUBFOLDER / f"{name}.onnx"
            shutil.copyfile(path, place)
            files.append(FolderFile(name, FLOAT, place.stat().st_size, None, None, chosen=False))
            feeds = rows_as_feeds(by_model.get(name), input_specs(graphs.load(path)))
            for dtype, keys in variants.items():
                place = stage / SUBFOLDER / f"{name}{SUFFIXES[dtype]}.onnx"
                own: dict[str, Any] = {"recipe": recipe} if keys is None else {"backend": recipe.backend, **keys}
                report = api.quantize(path, feeds, output=place, **own, **settings)
                if keys is not None and EMPTY in report.problem_codes:
                    place.unlink()
                    notes.append(Note(EMPTY, f"{place.name} is left out: it has no tensor that {dtype} quantizes"))
                    continue
                reports[place.stem] = replace(report, output=str(target.target / SUBFOLDER / place.name))
                files.append(_file(name, dtype, place, report))
        files = files if max_download is None else choose(files, max_download)
        target.copy_source(stage, skipped=list(_left_out(source.folder)))
        if max_download is not None:
            _select(stage / CONFIG, {file.module: file.dtype for file in files if file.chosen})
        folder_report = QuantizedFolder(reports, tuple(files), tuple(notes))
        record = [vars(file) for file in files]
        graphs.write_text(stage / RECORD, json.dumps({"files": record}, indent=2) + "\n")
    return folder_report


def choose(files: Sequence[FolderFile], max_download: int) -> list[FolderFile]:
    """Mark the dtype of each module: the least error of the worst module within the bytes, then the fewest bytes.

    The error of a module is its SQNR; the float model has none, and a file that was not measured comes last.

    Raises:
        OutputError: the smallest files are larger than `max_download`.
    """
    modules: dict[str, list[FolderFile]] = {}
    for file in files:
        modules.setdefault(file.module, []).append(file)
    least = sum(min(file.bytes for file in group) for group in modules.values())
    if least > max_download:
        raise OutputError(
            f"--max-download {max_download}: the smallest files of {', '.join(modules)} take {least} bytes: "
            "allow as many"
        )
    fitting = (
        pick for pick in itertools.product(*modules.values()) if sum(file.bytes for file in pick) <= max_download
    )
    best = max(fitting, key=lambda pick: (*sorted(map(_quality, pick)), -sum(file.bytes for file in pick)))
    return [replace(file, chosen=file in best) for file in files]


def _quality(file: FolderFile) -> float:
    if file.dtype == FLOAT:
        return math.inf
    return -math.inf if file.sqnr_db is None else file.sqnr_db


def _file(module: str, dtype: str, place: Path, report: Report) -> FolderFile:
    metrics = report.metrics
    outputs = () if metrics is None else metrics.outputs
    evaluation = None if metrics is None else metrics.evaluation
    return FolderFile(
        module,
        dtype,
        place.stat().st_size,
        min((output.sqnr_db for output in outputs), default=None),
        None if evaluation is None or not evaluation.rows else evaluation.rows[-1].metric.value,
        chosen=False,
    )


def _left_out(folder: Path) -> Iterator[Path]:
    """Yield files of a folder that are not copied: ONNX files, other frameworks' weights, hidden files."""
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if hidden or path.suffix.lower() in OTHER_WEIGHTS | {".onnx"}:
            yield path


def _select(config: Path, dtypes: Mapping[str, str]) -> None:
    """Write the dtype of each module into the configuration."""
    content = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    content[SELECTION] = {**content.get(SELECTION, {}), "dtype": dict(dtypes)}
    graphs.write_text(config, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
