"""Reading of model files: a skeleton and the positions of its weights. All invalid files are refused here.

Written files are checked by onnx.checker.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Final, NamedTuple

import onnx
from google.protobuf.message import DecodeError
from onnx import ModelProto, TensorProto, ValueInfoProto

from sbonnx.errors import MissingModelError, ModelError
from sbonnx.graph.opset_convert import hide_runtime_ops
from sbonnx.graph.protos import MAX_BODIES, single_line, tensor_protos, texts
from sbonnx.graph.storage.protobuf_payloads import REFERENCE, TooDeepError, detach, require_shallow
from sbonnx.graph.storage.weights import INLINE_BYTES, WeightBytes, byte_size
from sbonnx.graph.validation import check_tensor
from sbonnx.system.input_files import native_source

ModelSource = str | os.PathLike[str] | ModelProto | bytes
"""A model: path of a file, or in memory, as protobuf message or serialized."""

LOCATION: Final = b"location"
"""Key in external_data of the file that has the values."""

THE_MODEL: Final = "the given model"
"""Name of a model in memory in messages."""

SHOWN: Final = 100
"""Maximum characters of a file name in a message."""

INVALID: Final = (onnx.checker.ValidationError, onnx.shape_inference.InferenceError)

NOT_ONNX: Final = "it is not an ONNX model, or it is cut off"
AGAIN: Final = "copy or export it again"

EXPORT: Final = "torch.onnx.export(model, (example_input,), 'model.onnx', dynamo=True), then give 'model.onnx'"
"""Hint for models of PyTorch."""

OTHER_FILES: Final = (
    (0, b"PK\x03\x04", f"it is a zip archive, as .npz and PyTorch's files are: export the model to ONNX: {EXPORT}"),
    (0, b"\x89HDF\r\n", "it is an HDF5 file (Keras): export the model to ONNX"),
    (0, b"\x1f\x8b", "it is compressed with gzip: unpack it first"),
    (0, b"\x93NUMPY", "it is an .npy array: give the .onnx file"),
    (0, b"\x89PNG\r\n", "it is an image: give the .onnx file"),
    (0, b"\xff\xd8\xff", "it is an image: give the .onnx file"),
    (0, b"version https://git-lfs", "it is a pointer of Git LFS: run git lfs pull"),
    (4, b"TFL3", "it is a TensorFlow Lite model: export the model to ONNX"),
    (4, b"ORTM", "it is in onnxruntime's own format: give the .onnx file it was made from"),
)
"""File formats often given by mistake: offset, magic bytes, message."""


class Payload(NamedTuple):
    """Position of the bytes of a large tensor."""

    source: WeightBytes
    offset: int
    length: int

    def read(self) -> bytes:
        """Copy the bytes."""
        return bytes(self.source.buffer[self.offset : self.offset + self.length])


@dataclass
class OpenedModel:
    """Model without its large weights, and their positions."""

    model: ModelProto
    payloads: list[Payload]
    files: list[Path] = field(default_factory=list)
    path: Path | None = None
    sources: list[WeightBytes] = field(default_factory=list)

    @property
    def label(self) -> str:
        """Name of the model in messages."""
        return f"'{self.path}'" if self.path is not None else THE_MODEL


def label_of(source: object) -> str:
    """Return the name of a model in messages.

    Raises:
        ModelError: it is neither a path nor a model.
    """
    if isinstance(source, str | os.PathLike):
        return f"'{os.fspath(source)}'"
    if isinstance(source, (ModelProto, bytes)):
        return THE_MODEL
    kind = type(source).__name__
    what = f"{kind} is a torch module" if hasattr(source, "state_dict") else f"a model cannot be of type {kind}"
    raise ModelError(f"{what}, and sbonnx reads ONNX files: {EXPORT}")


def path_or_bytes(source: ModelSource) -> Path | bytes:
    """Return a model in the form that a session opens: the path of its file, or its serialized form.

    Raises:
        ModelError: it is neither a path nor a model, or too large for one message.
    """
    label_of(source)
    if isinstance(source, ModelProto):
        return bytes(_serialized(source).buffer)
    return source if isinstance(source, bytes) else Path(source)


def open_model(source: ModelSource) -> OpenedModel:
    """Open a file, or a model in memory, as skeleton and payloads.

    Raises:
        ModelError: the file is missing, a folder, empty, not ONNX or truncated, or its external data is missing, too
            short or outside the model's folder.
    """
    if isinstance(source, (ModelProto, bytes)):
        opened = _parse(_serialized(source), THE_MODEL)
    else:
        path = Path(source)
        try:
            _require_file(path)
            mapped = WeightBytes.map(path)
        except ModelError:
            raise
        except (OSError, ValueError) as error:  # ValueError: it was emptied since
            raise ModelError(f"'{path}' cannot be read: {_reason(error)}") from None
        opened = _parse(mapped, f"'{path}'")
        opened.path, opened.files, opened.sources = path, [path], [mapped]
    _resolve_external(opened)
    for read in opened.sources:
        read.require_unchanged()
    return opened


def external_names(path: Path) -> list[str]:
    """Return the locations of the external data that a model file names, sorted, whether or not the files exist.

    Empty if the file cannot be read as a model.
    """
    try:
        skeleton, _ = detach(WeightBytes.map(path).buffer, largest=INLINE_BYTES)
        model = ModelProto.FromString(skeleton if LOCATION in skeleton else b"")
    except (OSError, ValueError, DecodeError):  # ValueError: an empty file cannot be mapped, or no protobuf message
        return []
    rows = [{entry.key: entry.value for entry in tensor.external_data} for tensor, _ in tensor_protos(model)]
    locations = {row.get("location") for row in rows if REFERENCE not in row}
    return sorted(location for location in locations if location and isinstance(location, str))


def _serialized(model: ModelProto | bytes) -> WeightBytes:
    try:
        data = model if isinstance(model, bytes) else model.SerializeToString()
    except (ValueError, DecodeError):
        text = f"{THE_MODEL} is larger than protobuf's limit of 2 GiB: save it with external data and give its path"
        raise ModelError(text) from None
    if not data:
        raise ModelError(f"{THE_MODEL} is empty")
    return WeightBytes(data)


def _require_file(path: Path) -> None:
    if path.is_dir():
        models = sorted(entry.name for entry in path.glob("*.onnx"))[:5]
        hint = f"give one of its files: {', '.join(models)}" if models else "it has no .onnx file"
        raise ModelError(f"'{path}' is a folder, not a model file; {hint}")
    if not path.exists():
        raise MissingModelError(f"'{path}' does not exist{_near(path)}")
    if not path.is_file():
        raise ModelError(f"'{path}' is not a regular file")
    if path.stat().st_size == 0:
        raise ModelError(f"'{path}' is empty (0 bytes): {AGAIN}")


def _near(path: Path) -> str:
    if not path.parent.is_dir():
        return f": there is no folder '{path.parent}', check the path"
    stems: dict[str, list[str]] = {}  # the suffix makes all names similar
    for entry in sorted(path.parent.iterdir()):
        if entry.is_file():
            stems.setdefault(entry.stem, []).append(entry.name)
    close = [name for stem in difflib.get_close_matches(path.stem, stems, n=3, cutoff=0.6) for name in stems[stem]]
    models = [name for names in stems.values() for name in names if name.endswith(".onnx")]
    hint = f"Similar names there: {', '.join(close[:3])}" if close else f"Models there: {', '.join(models[:3])}"
    return f": check the path. {hint}" if close or models else ": check the path"


def _parse(source: WeightBytes, label: str) -> OpenedModel:
    start = bytes(source.buffer[:64])
    hint = next((f": {what}" for at, magic, what in OTHER_FILES if start[at:].startswith(magic)), "")
    if not hint and all(byte in b"\t\r\n" or 32 <= byte < 127 for byte in start):
        hint = ": it is a text file: give the .onnx file, or export the model to ONNX"
    try:
        skeleton, spans = detach(source.buffer, largest=INLINE_BYTES)
        try:
            model: ModelProto = ModelProto.FromString(skeleton)
        except DecodeError:
            require_shallow(skeleton)
            raise
    except TooDeepError:
        text = f"its graphs are nested deeper than protobuf reads, about {MAX_BODIES} levels"
        raise ModelError(f"{label} cannot be read: {text}") from None
    except (ValueError, DecodeError) as error:
        reason = f" ({error})" if isinstance(error, ValueError) else ""
        raise ModelError(f"{label} cannot be read{hint or f': {NOT_ONNX}{reason}: {AGAIN}'}") from None
    if not model.HasField("graph") or not model.ir_version:
        lacks = "graph" if not model.HasField("graph") else "ir_version"
        raise ModelError(f"{label} cannot be read{hint or f': {NOT_ONNX} (no {lacks}): {AGAIN}'}")
    broken = next((text for text in texts(model) if isinstance(text, bytes)), None)
    if broken is not None:
        raise ModelError(f"{label} cannot be read: the name {broken!r} in it is not text, the file is damaged: {AGAIN}")
    return OpenedModel(model, [Payload(source, span.offset, span.length) for span in spans])


def _resolve_external(opened: OpenedModel) -> None:
    """In place. Turn every external tensor into a reference to a payload, or store its values if they are small."""
    sources: dict[Path, WeightBytes] = {}
    own = {str(number) for number in range(len(opened.payloads))}
    for tensor, where in tensor_protos(opened.model):
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        entries = {entry.key: entry.value for entry in tensor.external_data}
        number = entries.get(REFERENCE)
        if number is not None:
            if number not in own:  # not written by `detach`
                text = f"tensor '{where}' has an external_data entry that is not part of ONNX"
                raise ModelError(f"{opened.label}: {text}")
            own.discard(number)
            continue
        payload = _external_payload(tensor, where, entries, opened, sources)
        tensor.ClearField("data_location")
        tensor.ClearField("external_data")
        if payload is None or payload.length <= INLINE_BYTES:
            tensor.raw_data = b"" if payload is None else payload.read()
            continue
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key=REFERENCE, value=str(len(opened.payloads)))
        opened.payloads.append(payload)
    opened.files.extend(sources)
    opened.sources.extend(sources.values())


def _external_payload(
    tensor: TensorProto, where: str, entries: dict[str, str], opened: OpenedModel, sources: dict[Path, WeightBytes]
) -> Payload | None:
    """Locate an external tensor and map its file; None for a tensor without elements."""
    check_tensor(tensor, where)
    length = byte_size(tensor.data_type, prod(tensor.dims))
    location = entries.get("location", "")
    if tensor.data_type == TensorProto.STRING:
        raise ModelError(f"tensor '{where}' holds strings in external data, which ONNX does not allow")
    file = _external_file(where, location, opened)
    try:
        offset = int(entries.get("offset", 0))
        given = int(entries.get("length", length))
    except ValueError:
        raise ModelError(f"tensor '{where}': offset and length of its external data must be whole numbers") from None
    if given != length:
        raise ModelError(f"tensor '{where}' needs {length} bytes, and the model declares {given} in '{location}'")
    size = file.stat().st_size
    if offset < 0 or offset + length > size:
        raise ModelError(
            f"tensor '{where}' is declared at bytes {offset} to {offset + length} of '{location}', "
            f"which has only {size}: the file is cut off or belongs to another model"
        )
    if length == 0:
        return None
    if file not in sources:
        try:
            sources[file] = WeightBytes.map(file)
        except (OSError, ValueError) as error:
            raise ModelError(f"external data '{file}' of tensor '{where}' cannot be read: {_reason(error)}") from None
    return Payload(sources[file], offset, length)


def _reason(error: Exception) -> str:
    """Return the cause alone: the text of an OSError repeats the path."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _external_file(where: str, location: str, opened: OpenedModel) -> Path:
    """Return the file of an external tensor, which must be in the model's folder."""
    if opened.path is None:
        text = f"tensor '{where}' of {THE_MODEL} has its values in the file '{location}': give the model's path"
        raise ModelError(text)
    if not location:
        raise ModelError(f"tensor '{where}' is external, and the model does not name its file")
    folder = opened.path.parent.resolve()
    try:
        file = (folder / location).resolve()
        regular = file.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # too long, circular links, a NUL
        text = repr(location if len(location) <= SHOWN else f"{location[:SHOWN]}...")
        raise ModelError(f"tensor '{where}' has its values in {text}, which is not a file: {_reason(error)}") from None
    if Path(location).is_absolute() or not file.is_relative_to(folder):
        raise ModelError(
            f"tensor '{where}' has its values in '{location}', outside the model's folder: refused. "
            f"Put the file next to {opened.label}{_hub_hint(folder)}"
        )
    if not regular:
        raise ModelError(f"'{location}' with the values of tensor '{where}' is missing next to {opened.label}")
    return file


def _hub_hint(folder: Path) -> str:
    """Return how to get files without links, for a folder in the cache of the Hugging Face hub."""
    names = [part for part in folder.parts if part.startswith("models--")]
    if not names or "snapshots" not in folder.parts:
        return ""
    name = names[-1].removeprefix("models--").replace("--", "/")
    return f": `hf download {name} --local-dir FOLDER` writes files instead of links to the cache"


def read_proto(path: str | os.PathLike[str]) -> ModelProto:
    """Read the model of a file without its external data.

    Raises:
        ModelError: the file cannot be read, for example because it was truncated after loading.
    """
    try:
        return onnx.load_model(os.fspath(path), load_external_data=False)
    except (OSError, DecodeError) as error:
        raise ModelError(f"'{os.fspath(path)}' cannot be read: {error}; was it modified meanwhile?") from error


def check_file(path: str | os.PathLike[str]) -> None:
    """Run onnx.checker with full check.

    It requires types and shapes of all inputs and outputs. Runtimes do not require those that cannot be inferred. If
    a model omits one of these, the structure is checked with a placeholder, and types and shapes without it. Operators
    that only the runtime knows (`RUNTIME_OPS`) are not checked.

    Raises:
        ModelError: the file is not valid.
    """
    try:
        onnx.checker.check_model(native_source(path), full_check=True)
    except INVALID as error:
        problem = _other_problem(path, error)
        if problem is not None:
            raise ModelError(f"{os.fspath(path)} does not pass onnx.checker: {single_line(problem)}") from error


def _other_problem(path: str | os.PathLike[str], error: Exception) -> Exception | None:
    """Return the error of a file besides missing types or shapes of inputs or outputs, and operators of the runtime.

    Args:
        error: of the file as it is.
    """
    model = read_proto(path)
    lacking = [value for value in [*model.graph.input, *model.graph.output] if _lacks_shape(value)]
    if not hide_runtime_ops(model) and not lacking:
        return error
    try:
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
        for value in lacking:
            value.type.tensor_type.elem_type = value.type.tensor_type.elem_type or TensorProto.FLOAT
            value.type.tensor_type.shape.SetInParent()
        for tensor, _ in tensor_protos(model):
            if tensor.data_location == TensorProto.EXTERNAL:  # read by path, which a copy does not have
                tensor.CopyFrom(TensorProto(name=tensor.name, data_type=tensor.data_type, dims=[0], raw_data=b""))
        onnx.checker.check_model(model)
    except INVALID as other:
        return other
    return None


def _lacks_shape(value: ValueInfoProto) -> bool:
    kind = value.type.WhichOneof("value")
    return kind is None or (kind == "tensor_type" and not value.type.tensor_type.HasField("shape"))
