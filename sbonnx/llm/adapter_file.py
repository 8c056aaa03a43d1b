"""Adapters as inputs of a decoder (multi-LoRA), and their values in files of onnxruntime (.onnx_adapter).

The factors of each adapter are initializers of rank 0 that are also listed as inputs. onnxruntime uses the initializer
unless the run has an active adapter: without one, the decoder computes what its base does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import onnx
from onnx import helper

from sbonnx.errors import ModelError
from sbonnx.graph import read_proto
from sbonnx.spec import Array
from sbonnx.system.input_files import native_source
from sbonnx.system.runtime import onnxruntime, reason

ADAPTER: Final = "adapter.onnx_adapter"
"""Name of the file in the output folder."""

VERSION: Final = 1
"""Version of the adapter and of the model in the file."""

RANK: Final = "rank"
"""Name of the dynamic axis."""


def list_inputs(model: Path, factors: Mapping[str, Array]) -> None:
    """List the factors of adapters among the inputs of a model file, in place; the rank is a dynamic axis.

    Args:
        model: file with one initializer of rank 0 for each factor.
        factors: A (inputs, rank) and B (rank, outputs) of the adapters, by initializer.
    """
    proto = read_proto(model)
    for tensor in proto.graph.initializer:
        if tensor.name in factors:
            dims = [size or RANK for size in tensor.dims]
            proto.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, dims))
    onnx.save(proto, model)


def write_adapter(path: Path, factors: Mapping[str, Array]) -> None:
    """Write the factors of adapters, by input, in onnxruntime's format."""
    ort = onnxruntime()
    adapter = ort.AdapterFormat()
    adapter.set_adapter_version(VERSION)
    adapter.set_model_version(VERSION)
    adapter.set_parameters({name: ort.OrtValue.ortvalue_from_numpy(values) for name, values in factors.items()})
    adapter.export_adapter(str(path))


class ActiveAdapter:
    """Run options in which an adapter is active.

    onnxruntime's options do not keep the adapter alive, so this object must live as long as they are used.

    Args:
        path: file of the adapter; None: no adapter.

    Attributes:
        options: for `InferenceSession.run`; None without an adapter.

    Raises:
        ModelError: onnxruntime cannot read the file.
    """

    def __init__(self, path: Path | None) -> None:
        self.options: Any = None
        if path is None:
            return
        ort = onnxruntime()
        self._loaded = ort.LoraAdapter()
        try:
            self._loaded.Load(native_source(path))
        except Exception as error:  # onnxruntime's own exceptions share no base class
            raise ModelError(f"'{path}' cannot be read as an adapter of onnxruntime: {reason(error)}") from error
        self.options = ort.RunOptions()
        self.options.add_active_adapter(self._loaded)
