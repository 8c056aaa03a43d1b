"""Reading of protos from files, and onnx.checker on written files."""

from __future__ import annotations

import os
from collections.abc import Iterator

import onnx
from google.protobuf.message import DecodeError
from onnx import ModelProto, TensorProto, ValueInfoProto

from sbonnx.errors import ModelError
from sbonnx.graph.protos import tensor_protos
from sbonnx.input_files import native_source

INVALID = (onnx.checker.ValidationError, onnx.shape_inference.InferenceError)


def read_proto(path: str | os.PathLike[str]) -> ModelProto:
    """Read the model of a file without its external data.

    Raises:
        ModelError: the file cannot be read, for example because it was truncated after loading.
    """
    try:
        return onnx.load_model(os.fspath(path), load_external_data=False)
    except (OSError, DecodeError) as error:
        raise ModelError(f"'{os.fspath(path)}' cannot be read: {error}; was it written to meanwhile?") from error


def check_file(path: str | os.PathLike[str]) -> None:
    """Run onnx.checker with full check.

    It requires types and shapes of all inputs and outputs. Runtimes do not require those that cannot be inferred. If
    a model omits one of these, the structure is checked with a placeholder, and types and shapes without it.

    Raises:
        ModelError: the file is not valid.
    """
    try:
        onnx.checker.check_model(native_source(path), full_check=True)
    except INVALID as error:
        if not _is_valid_but_for_shapes(path):
            raise ModelError(f"{os.fspath(path)} does not pass onnx.checker: {' '.join(str(error).split())}") from error


def _is_valid_but_for_shapes(path: str | os.PathLike[str]) -> bool:
    """Whether missing types or shapes of inputs or outputs are the only error."""
    model = read_proto(path)
    lacking = list(_without_shape(model))
    if not lacking:
        return False
    try:
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
        for value in lacking:
            value.type.tensor_type.elem_type = value.type.tensor_type.elem_type or TensorProto.FLOAT
            value.type.tensor_type.shape.SetInParent()
        for tensor, _ in tensor_protos(model):
            if tensor.data_location == TensorProto.EXTERNAL:  # read by path, which a copy does not have
                tensor.CopyFrom(TensorProto(name=tensor.name, data_type=tensor.data_type, dims=[0], raw_data=b""))
        onnx.checker.check_model(model)
    except INVALID:
        return False
    return True


def _without_shape(model: ModelProto) -> Iterator[ValueInfoProto]:
    for value in [*model.graph.input, *model.graph.output]:
        kind = value.type.WhichOneof("value")
        if kind is None or (kind == "tensor_type" and not value.type.tensor_type.HasField("shape")):
            yield value
