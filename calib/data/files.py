"""Feeds from files and folders: npz, npy, Polygraphy JSON, ONNX test data, formats of plug-ins."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from sbonnx import plugins
from sbonnx.calib.data.annotations import annotated_at
from sbonnx.calib.data.data_path import DataPath
from sbonnx.calib.data.judged_folder import retrieval_at
from sbonnx.calib.data.labels import LABEL, batched_labels
from sbonnx.calib.data.objects import Sampling, Source, listed
from sbonnx.calib.data.readers.media_files import (
    LABEL_FILES,
    MEDIA,
    MediaFiles,
    find_media,
    kind_of,
    labels_of,
    natural,
)
from sbonnx.calib.data.readers.open_media import open_media
from sbonnx.calib.data.readers.python_file import open_call
from sbonnx.calib.data.stored_arrays import StoredArray, first_line, lengths_of_files, open_stored, stored_in
from sbonnx.calib.data.validate import InputSpec
from sbonnx.errors import DataError, MissingDataError
from sbonnx.plugins.registry import Registry, function
from sbonnx.report.codes import Note
from sbonnx.system.input_files import check_regular, read_regular

KEPT_BYTES: Final = 64 << 20
"""Bytes of an array up to which the only file of the data is read once, not in each pass over the samples."""

KNOWN = (".npz", ".npy", ".json")

Reader = Callable[[Path, Sequence[InputSpec]], Any]
"""Function of a path and the inputs of the model that returns or yields feeds, in any form that objects may have.

A generator function is called again for each iteration.
"""

READERS: Final[Registry[Reader]] = Registry(
    plugins.READERS, function, {}, {suffix[1:] for suffix in KNOWN}.union(*({s[1:] for s in m} for m in MEDIA.values()))
)
"""Readers of installed packages by file suffix, in lower case and without the dot."""

MAX_JSON: Final = 1 << 30
"""Maximum size in bytes of a JSON file, which is read whole and kept. Larger data needs a binary format."""

MAX_PROTO: Final = (1 << 31) - 1
"""Largest message in bytes that protobuf reads."""


def open_path(data: str | os.PathLike[str], inputs: Sequence[InputSpec], sampling: Sampling) -> Source:
    """Open the reader for a file or folder: that of its suffix, else by its contents.

    Args:
        sampling: as in `open_source`.

    Raises:
        DataError: it does not exist, or holds no supported data, or several kinds.
        RecipeError: the plug-in for its suffix is not usable.
    """
    path, preprocess = Path(data), data.preprocess if isinstance(data, DataPath) else None
    retrieval = retrieval_at(path)
    if retrieval is not None:
        return retrieval.open(lambda part: open_path(DataPath(part, preprocess), inputs, Sampling()))
    reader = READERS.get(path.suffix.lower()[1:]) if os.path.exists(path) else None
    if reader is not None:
        source = _of_plugin(path, reader, inputs, sampling)
    else:
        media = annotated_at(path) or media_at(path)
        if media is not None:
            return open_media(*media, inputs, preprocess)
        source = _open_arrays(path, inputs, sampling)
    if preprocess is None:
        return source
    note = Note("preprocessing-not-applied", f"the preprocessing is not applied to '{path}', which holds arrays")
    return replace(source, notes=(*source.notes, note))


def _of_plugin(path: Path, reader: Reader, inputs: Sequence[InputSpec], sampling: Sampling) -> Source:
    return open_call(str(path), lambda: reader(path, inputs), sampling)


def _open_arrays(path: Path, inputs: Sequence[InputSpec], sampling: Sampling) -> Source:
    if os.path.isdir(path):  # False also for names that the system does not allow
        return _open_folder(path, inputs, sampling)
    try:
        check_regular(path)
    except FileNotFoundError as error:
        raise MissingDataError(f"there is no file or folder '{path}': check the path of the data") from error
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror}") from error
    if path.suffix in (".npz", ".npy"):
        opened = cache(lambda: _keeping(open_stored(path)))
        return listed(f"'{path}'", 1, lambda _: (f"'{path}'", opened()), lambda: lengths_of_files([path]))
    if path.suffix == ".json":
        return _polygraphy(path)
    raise DataError(
        f"'{path}' is no data file: give {', '.join([*KNOWN, *(f'.{suffix}' for suffix in READERS)])}, images, audio "
        "or texts, a folder of them, or data.py:f"
    )


def _keeping(stored: StoredArray | dict[str, StoredArray]) -> StoredArray | dict[str, StoredArray]:
    """Let small arrays of a file keep their values: a run reads its only file once for each pass over the data."""
    for array in stored.values() if isinstance(stored, dict) else [stored]:
        array.keep(KEPT_BYTES)
    return stored


def media_at(path: Path) -> tuple[str, MediaFiles] | None:
    """Return the kind and the files of images, audio or texts at a path; None if it holds others."""
    if not os.path.isdir(path):
        kind = kind_of(path)
        return None if kind is None or not os.path.exists(path) else (kind, MediaFiles(f"'{path}'", (path,)))
    entries = _children(path)
    media = find_media(path, entries)
    if media is not None and media[0] == "texts" and any(_is_arrays(entry) for entry in entries):
        return None  # notes next to other data
    return media


def _is_arrays(entry: Path) -> bool:
    return entry.suffix in KNOWN or entry.name.startswith(("test_data_set", "input_"))


def _children(folder: Path) -> list[Path]:
    """List the visible entries of a folder, in natural order.

    Raises:
        DataError: the folder cannot be read, or a data file in it is not a regular file (a dangling link, a FIFO).
    """
    try:
        entries = sorted((entry for entry in folder.iterdir() if not entry.name.startswith(".")), key=natural)
        for entry in entries:
            if entry.suffix in (*KNOWN, ".pb") and not entry.is_dir():
                check_regular(entry)
    except OSError as error:
        raise DataError(f"'{error.filename}' cannot be read: {error.strerror}") from error
    return entries


def _open_folder(folder: Path, inputs: Sequence[InputSpec], sampling: Sampling) -> Source:
    entries = [entry for entry in _children(folder) if entry.name not in LABEL_FILES]
    files = {suffix: [e for e in entries if e.is_file() and e.suffix == suffix] for suffix in (*KNOWN, ".pb")}
    folders = [entry for entry in entries if entry.is_dir()]
    test_sets = [entry for entry in folders if entry.name.startswith("test_data_set")]
    if any(entry.name.startswith("input_") for entry in files[".pb"]):
        test_sets, files[".pb"] = [folder], []
    kinds = [suffix for suffix, paths in files.items() if paths and suffix != ".pb"]
    if len(kinds) + bool(test_sets) > 1:
        mixed = [*kinds, *(["test_data_set_*"] if test_sets else [])]
        raise DataError(f"folder '{folder}' mixes {' and '.join(mixed)}: keep one kind of data in it")
    if test_sets:
        return _of_files(folder, test_sets, lambda path: _load_test_set(path, inputs))
    if files[".npz"] or files[".npy"]:
        return _of_files(folder, files[".npz"] or files[".npy"], open_stored)
    if files[".json"]:
        sources = [_polygraphy(path) for path in files[".json"]]
        return Source(f"folder '{folder}'", lambda: (pair for source in sources for pair in source.feeds()))
    if folders:
        return _of_input_folders(folder, inputs)
    if not entries:
        raise DataError(f"folder '{folder}' is empty: put .npz files (one feed each) or images in it")
    suffixes = sorted({entry.suffix or entry.name for entry in entries})
    readable = [suffix for suffix in suffixes if suffix.lower()[1:] in READERS]
    if readable:
        return _of_plugin_files(
            folder, readable, [entry for entry in entries if entry.suffix in readable], inputs, sampling
        )
    raise DataError(
        f"folder '{folder}' holds no .npz, .npy, test_data_set_*, images, audio or texts "
        f"({', '.join(suffixes[:3])} found): preprocess the samples as for inference and save each with np.savez"
    )


def _of_files(folder: Path, paths: list[Path], load: Any) -> Source:
    """Return the source for one feed per file (or test set), with the labels of a label file of the folder."""
    labels = labels_of(folder, paths) or {}

    def at(number: int) -> tuple[str, Any]:
        path = paths[number]
        return f"'{path}'", (load(path), batched_labels([{LABEL: labels[path]}])) if path in labels else load(path)

    lengths = None if load is not open_stored else lambda: lengths_of_files(paths)
    return listed(f"folder '{folder}'", len(paths), at, lengths)


def _of_plugin_files(
    folder: Path, suffixes: list[str], paths: list[Path], inputs: Sequence[InputSpec], sampling: Sampling
) -> Source:
    """Return the source for the feeds of all files of one format of a plug-in."""
    if len(suffixes) > 1:
        raise DataError(f"folder '{folder}' mixes {' and '.join(suffixes)}: keep one kind of data in it")
    reader = READERS[suffixes[0].lower()[1:]]
    return Source(
        f"folder '{folder}'",
        lambda: (pair for path in paths for pair in _of_plugin(path, reader, inputs, sampling).feeds()),
    )


def _of_input_folders(folder: Path, inputs: Sequence[InputSpec]) -> Source:
    """Return the source for a folder with a subfolder of .npy files per input; the n-th files form a feed."""
    columns: dict[str, list[Path]] = {}
    for spec in inputs:
        place = folder / spec.name
        if place.is_dir():
            columns[spec.name] = [entry for entry in _children(place) if entry.suffix == ".npy"]
        elif not spec.optional:
            raise DataError(
                f"folder '{folder}' holds no .npz or .npy files and no subfolder '{spec.name}': "
                "save one .npz a feed, or a subfolder of .npy files for each input"
            )
    counts = {name: len(paths) for name, paths in columns.items()}
    if len(set(counts.values())) != 1 or 0 in counts.values():
        counted = ", ".join(f"'{name}' {count}" for name, count in counts.items())
        raise DataError(f"the subfolders of '{folder}' must hold equally many .npy files ({counted})")

    rows = list(zip(*columns.values(), strict=True))

    def at(number: int) -> tuple[str, Any]:
        feed = {name: open_stored(path) for name, path in zip(columns, rows[number], strict=True)}
        return f"'{rows[number][0]}'", feed

    return listed(f"folder '{folder}'", len(rows), at, lambda: lengths_of_files([row[0] for row in rows]))


def _polygraphy(path: Path) -> Source:
    """Read Polygraphy's JSON: a list of feeds, each array the base64 text of an .npy file."""
    try:
        feeds = json.loads(read_regular(path, MAX_JSON))
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise DataError(f"'{path}' is nested too deeply to be a list of feeds") from error
    except ValueError as error:
        raise DataError(f"'{path}' is no readable JSON: {str(error).splitlines()[0]}") from error
    feeds = [feeds] if isinstance(feeds, dict) else feeds
    if not isinstance(feeds, list) or not all(isinstance(feed, dict) for feed in feeds):
        raise DataError(f"'{path}' is no list of feeds: save it with Polygraphy's save_json([{{name: array}}, ...])")

    def at(number: int) -> tuple[str, Any]:
        where = f"feed {number} of '{path}'"
        return where, {name: _decode(value, f"'{name}' in {where}") for name, value in feeds[number].items()}

    return listed(f"'{path}'", len(feeds), at, None)


def _decode(value: Any, what: str) -> StoredArray:
    """Decode one array of a Polygraphy file: `{"array": base64 of .npy}`; a LazyArray wraps it in `values`."""
    if isinstance(value, dict) and isinstance(value.get("values"), dict):
        value = value["values"]
    text = value.get("array") if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise DataError(f"{what} is no array in Polygraphy's form: save the feeds with Polygraphy's save_json")
    try:
        content = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise DataError(f"{what} cannot be decoded: {error}") from error
    stored = stored_in(content, what)
    # old Polygraphy versions wrote a .npz with one array
    return stored if isinstance(stored, StoredArray) else next(iter(stored.values()))


def _load_test_set(folder: Path, inputs: Sequence[InputSpec]) -> dict[str, Any]:
    """Read one ONNX test set: input_0.pb, input_1.pb, ... in the order of the graph's inputs."""
    import onnx  # imported here because worker processes need `InputSpec` quickly, and no files

    feed: dict[str, Any] = {}
    for index, spec in enumerate(inputs):
        path = folder / f"input_{index}.pb"
        tensor = onnx.TensorProto()
        try:
            tensor.ParseFromString(read_regular(path, MAX_PROTO))
            if not tensor.data_type:
                raise ValueError("it holds no tensor")
            if tensor.external_data or tensor.data_location == onnx.TensorProto.EXTERNAL:
                raise ValueError("its values lie in another file, save them in it")
            feed[spec.name] = onnx.numpy_helper.to_array(tensor)
        except FileNotFoundError as error:
            if not spec.optional:
                raise DataError(f"'{folder}' holds no input_{index}.pb for input '{spec.name}'") from error
        except OSError as error:
            raise DataError(f"'{path}' cannot be read: {error.strerror}") from error
        except Exception as error:  # protobuf's DecodeError has no common base with the others
            raise DataError(f"'{path}' is no readable TensorProto: {first_line(error)}") from error
    if (folder / f"input_{len(inputs)}.pb").exists():
        raise DataError(f"'{folder}' holds more inputs than the model's {len(inputs)}")
    return feed
