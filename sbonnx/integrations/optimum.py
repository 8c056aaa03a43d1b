"""Model folders of Hugging Face: a folder with a float model in, a folder with `*_quantized.onnx` out.

The names are those of Optimum's ORTQuantizer, so that ``ORTModelFor….from_pretrained(folder,
file_name="model_quantized.onnx")`` loads the result. Optimum itself is not needed to quantize.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sbonnx import graph as graphs
from sbonnx.api import create as api
from sbonnx.calib.data import DataPath, InputSpec, Preprocessing, with_preprocess
from sbonnx.calib.data.dataset import input_specs, read
from sbonnx.calib.data.files import media_at
from sbonnx.errors import DataError, MissingModelError, ModelError
from sbonnx.graph.storage.model_file import external_names
from sbonnx.graph.storage.output_folder import OutputFolder
from sbonnx.integrations.decoder_feeds import DECODERS, ENCODER, FIRST, EncoderDecoderFeeds
from sbonnx.llm.encoders.encoder import TokenIds
from sbonnx.llm.encoders.sources import PROCESSORS
from sbonnx.progress import Progress
from sbonnx.report import Report
from sbonnx.values import json_values, plain
from sbonnx.version import __version__

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from sbonnx.recipe.keywords import QuantizeKeywords

CONFIG: Final = "ort_config.json"
"""File of Optimum's ORTConfig, with the recipe and the figures under the key "sbonnx"."""

SUFFIX: Final = "_quantized"
SUBFOLDER: Final = "onnx"
"""Folder of the ONNX files in repositories of the hub."""

OTHER_WEIGHTS: Final = frozenset({".safetensors", ".bin", ".h5", ".msgpack", ".ckpt", ".pt", ".pth", ".ot"})
"""Suffixes of weights for other frameworks, which are left out; external data of ONNX files has its own rule."""

TYPES: Final = {
    name.replace("Q", "").lower(): name for name in ("QInt4", "QUInt4", "QInt8", "QUInt8", "QInt16", "QUInt16")
}
"""Names of onnxruntime.quantization.QuantType, which Optimum's configuration uses, by type."""


@dataclass(frozen=True)
class ModelFolder:
    """A folder with a configuration and ONNX files.

    Attributes:
        folder: its path.
        models: ONNX files by name without suffix, such as ``model`` or ``encoder_model``.
    """

    folder: Path
    models: Mapping[str, Path]

    @classmethod
    def read(cls, folder: str | os.PathLike[str], quantized: tuple[str, ...] = (SUFFIX,)) -> ModelFolder:
        """Find the ONNX files of a folder, in it or in its subfolder ``onnx``; quantized ones are left out.

        Args:
            quantized: ends of the names of quantized files.

        Raises:
            ModelError: it is no folder, or has no ONNX file.
        """
        path = Path(folder)
        if not path.is_dir():
            raise MissingModelError(f"there is no folder '{path}': give the folder with config.json and model.onnx")
        for place in (path, path / SUBFOLDER):
            files = [file for file in sorted(place.glob("*.onnx")) if not file.stem.endswith(quantized)]
            if files:
                return cls(path, {file.stem: file for file in files})
        raise ModelError(
            f"folder '{path}' has no .onnx file: export the model first, as with optimum-cli export onnx --model NAME "
            "FOLDER"
        )

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the folder has an encoder, and a decoder that can run without a past."""
        return ENCODER in self.models and any(name in self.models for name in FIRST)

    @property
    def preprocess(self) -> Path | None:
        """Configuration of the image processor, or the tokenizer; None: the folder has neither."""
        return next((self.folder / name for name in PROCESSORS if (self.folder / name).is_file()), None)


def quantize_folder(
    folder: str | os.PathLike[str],
    data: Any,
    output: str | os.PathLike[str],
    *,
    files: Sequence[str] | None = None,
    split: int | None = None,
    preprocess: Preprocessing | None = None,
    force: bool = False,
    progress: Progress | None = None,
    **keywords: Unpack[QuantizeKeywords],
) -> dict[str, Report]:
    """Quantize the ONNX files of a model folder, and copy its configuration, tokenizer and processor.

    Args:
        folder: with config.json, tokenizer or image processor, and model.onnx or several files
            (encoder_model.onnx, decoder_model.onnx, ...), in it or in its subfolder ``onnx``.
        data: calibration data as `sbonnx.quantize` takes it, or a `datasets.Dataset` with columns named as the inputs,
            or with rows of texts as a file (.txt, .jsonl), which are tokenized with the folder's tokenizer.json.
            For several files: a dict of data by file name without suffix, or a folder with an entry for each
            (``text_model.npz``, ``vision_model/``); files that it does not name are copied. For an encoder-decoder
            model, the data of the encoder is enough: the decoders get its states and the tokens that the float models
            decode.
            None: no ranges are measured (MODE dynamic or weight_only).
        output: folder to create.
        files: names without suffix of the files to quantize; None: all, or those that `data` names. Other files are
            copied as they are.
        split, progress, keywords: as in `sbonnx.quantize`, for every file.
        preprocess: as in `sbonnx.quantize`; None: the image processor or the tokenizer of the folder.
        force: replace an output folder of an earlier run.

    Returns:
        The reports by file name without suffix.

    Raises:
        SbonnxError: a subclass, for every error that the user can fix. No partial folder is left.
    """
    source = ModelFolder.read(folder)
    chosen, decoders = _chosen(source, data, files)
    graphs_by_name = {name: graphs.load(source.models[name]) for name in chosen}
    for name, feeds in chosen.items():
        chosen[name] = with_preprocess(feeds, processor_of(source, feeds) if preprocess is None else preprocess)
    if decoders:
        encoder, tokens = graphs.load(source.models[ENCODER]), TokenIds.read(source.folder)
        feeds = read(rows_as_feeds(chosen[decoders[0]], input_specs(encoder)), encoder, split=split)
        chosen |= {name: EncoderDecoderFeeds(source.models, name, feeds, tokens) for name in decoders}
    inputs = [path for graph in graphs_by_name.values() for path in graph.info.files]
    target = OutputFolder(Path(output), source.folder, tuple(inputs), CONFIG, force)
    reports: dict[str, Report] = {}
    with target.staged() as stage:
        for name, feeds in chosen.items():
            path = source.models[name]
            place = stage / path.relative_to(source.folder).with_name(f"{name}{SUFFIX}.onnx")
            place.parent.mkdir(exist_ok=True)
            report = api.quantize(
                path,
                rows_as_feeds(feeds, input_specs(graphs_by_name[name])),
                output=place,
                split=None if name in decoders else split,
                progress=progress,
                **keywords,
            )
            reports[name] = replace(report, output=str(target.target / place.relative_to(stage)))
        config = ort_config(reports, external_data=any(external_names(place) for place in stage.rglob("*.onnx")))
        notes = target.copy_source(stage, skipped=_left_out(source, chosen))
        reports = {name: replace(report, notes=(*report.notes, *notes)) for name, report in reports.items()}
        text = json.dumps(json_values(config), indent=2, ensure_ascii=False, allow_nan=False)
        graphs.write_text(stage / CONFIG, f"{text}\n")
    return reports


def _chosen(source: ModelFolder, data: Any, files: Sequence[str] | None) -> tuple[dict[str, Any], list[str]]:
    """Return the calibration data of each file to quantize, by name, and the decoders that got that of the encoder.

    Raises:
        ModelError: there is no such file.
        DataError: several files and not one data set for each.
    """
    by_file = _data_by_file(source, data)
    derived = by_file is None and data is not None and source.is_encoder_decoder
    if files is not None:
        wanted = [name.removesuffix(".onnx") for name in files]
    elif by_file is not None:
        wanted = list(by_file)
    else:
        wanted = [name for name in source.models if not derived or name in (ENCODER, *DECODERS)]
    names = ", ".join(source.models)
    unknown = [name for name in wanted if name not in source.models]
    if unknown:
        raise ModelError(f"folder '{source.folder}' has no '{unknown[0]}.onnx': it has {names}")
    if by_file is None:
        if data is not None and len(wanted) > 1 and not derived:
            raise DataError(
                f"folder '{source.folder}' has {names}, whose inputs differ: give a folder with data for each, such as "
                f"{wanted[0]}.npz (decoders that generate text: sbonnx llm quantize)"
            )
        return dict.fromkeys(wanted, data), [name for name in wanted if derived and name in DECODERS]
    missing = [name for name in wanted if name not in by_file]
    if missing:
        raise DataError(f"there is no data for '{missing[0]}': the data is for {', '.join(by_file)}")
    return {name: by_file[name] for name in wanted}, []


def chosen_data(source: ModelFolder, data: Any) -> list[tuple[str, Any]]:
    """Return the calibration data of each model by name; None where the data names other models only.

    Raises:
        DataError: several models and not one data set for each.
    """
    feeds, decoders = _chosen(source, data, None)
    if decoders:
        raise DataError(
            f"folder '{source.folder}' is an encoder-decoder model: give a folder with data for each of "
            f"{', '.join(source.models)}"
        )
    return [(name, feeds.get(name)) for name in source.models]


def _data_by_file(source: ModelFolder, data: Any) -> dict[str, Any] | None:
    """Return data that names files of the model folder: a dict, or a folder with an entry for each; None for other."""
    if isinstance(data, Mapping):
        return dict(data) if data and all(str(key) in source.models for key in data) else None
    if len(source.models) == 1 or not isinstance(data, (str, os.PathLike)) or not os.path.isdir(data):
        return None
    named = {entry.name if entry.is_dir() else entry.stem: entry for entry in sorted(Path(data).iterdir())}
    preprocess = data.preprocess if isinstance(data, DataPath) else None
    return {name: DataPath(named[name], preprocess) for name in source.models if name in named} or None


def _left_out(source: ModelFolder, chosen: Mapping[str, Any]) -> list[Path]:
    """Return files of the folder that are not copied: other frameworks' weights, hidden files, what is written anew."""
    replaced = {source.models[name].with_name(f"{name}{SUFFIX}.onnx") for name in chosen}
    return [
        path
        for path in source.folder.rglob("*")
        if path in replaced
        or path.suffix.lower() in OTHER_WEIGHTS
        or any(part.startswith(".") for part in path.relative_to(source.folder).parts)
    ]


def processor_of(source: ModelFolder, data: Any) -> Path | None:
    """Return the processor of the folder if the data is a path that may need one and has none."""
    if isinstance(data, DataPath) and data.preprocess is not None:
        return None
    needs_it = isinstance(data, (str, os.PathLike)) and media_at(Path(data)) is not None
    return source.preprocess if needs_it else None


def rows_as_feeds(data: Any, inputs: Sequence[InputSpec]) -> Any:
    """Return the rows of a `datasets.Dataset` as feeds of one sample; other data unchanged.

    Columns named as inputs become arrays with a batch axis, as they are stored or as lists; other columns are left out.

    Raises:
        DataError: an input has no column.
    """
    columns = getattr(data, "column_names", None)
    if not isinstance(columns, list):
        return data
    names = [spec.name for spec in inputs]
    missing = [name for name in names if name not in columns]
    if missing:
        raise DataError(
            f"the data set has no column '{missing[0]}', an input of the model; it has {', '.join(columns)}: "
            "tokenize or preprocess it first, with Dataset.map"
        )
    return _FeedRows(data, names)


@dataclass(frozen=True)
class _FeedRows:
    """Feeds of a data set that can be iterated repeatedly."""

    data: Any
    names: Sequence[str]

    def __iter__(self) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
        for row in self.data:
            yield {name: np.asarray(row[name])[None] for name in self.names}

    def __len__(self) -> int:
        return len(self.data)


def ort_config(reports: Mapping[str, Report], *, external_data: bool) -> dict[str, Any]:
    """Return the content of ort_config.json: fields of Optimum's ORTConfig, and under "sbonnx" recipe and figures."""
    first = next(iter(reports.values()))
    return {
        "opset": None,
        "one_external_file": True,
        "use_external_data_format": external_data,
        "optimization": {},
        "quantization": {
            "is_static": first.settings["MODE"] == "static",
            "format": "QDQ",
            "mode": "QLinearOps" if first.settings["MODE"] == "static" else "IntegerOps",
            "activations_dtype": _usual_type(first, "activation", "QUInt8"),
            "weights_dtype": _usual_type(first, "weight", "QInt8"),
        },
        "sbonnx": {
            "version": __version__,
            "recipe": first.settings,
            "files": {
                name: {
                    "output": Path(report.output or "").name,
                    "problems": report.problems,
                    "metrics": plain(report.metrics) or {},
                }
                for name, report in reports.items()
            },
        },
    }


def _usual_type(report: Report, role: str, default: str) -> str:
    """Return the type that most tensors of a role have, as Optimum names it."""
    labels = [site.label.split()[0] for site in report.sites if site.role == role]
    types = [label for label in labels if label in TYPES]
    return TYPES[max(sorted(set(types)), key=types.count)] if types else default
