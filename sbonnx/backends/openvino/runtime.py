"""OpenVINO: the only module that imports it and compiles models, and only when something is run.

openvino is the optional extra `openvino`. Importing it sends no telemetry: its package for that is used by the model
converter alone, which is not called here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx

from sbonnx.backends.runtime_types import Entry, ExecutedLayer, Runtime
from sbonnx.errors import DeviceError, MissingPackageError, ModelError
from sbonnx.spec import Array
from sbonnx.system.input_files import native_source

NOT_INSTALLED: Final = "OpenVINO is not installed: pip install 'sbonnx[openvino]'"

TYPES: Final[Mapping[str, str]] = {
    "f32": "float",
    "f64": "double",
    "f16": "float16",
    "bf16": "bfloat16",
    "boolean": "bool",
    "string": "string",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
    "u16": "uint16",
    "u32": "uint32",
    "u64": "uint64",
}
"""Element types of onnxruntime by those of OpenVINO."""

RENAMED: Final = re.compile(r"(/WithoutBiases|_original|/Dequantization\w+|_\d+(?=/))+$")
"""Suffixes that OpenVINO appends to the names of nodes that it splits."""

IDLE: Final = frozenset({"Const", "Input", "Output"})
"""Layers of the executed graph that compute nothing."""

INTEGER_CODES: Final = frozenset({"u8", "i8"})


@cache
def _core() -> Any:
    """Return the OpenVINO core of this process.

    Raises:
        DeviceError: OpenVINO is not installed, or does not load on this machine.
    """
    try:
        import openvino
    except ModuleNotFoundError as error:
        if error.name != "openvino":
            raise
        raise MissingPackageError(NOT_INSTALLED) from error
    except ImportError as error:
        reason = str(error).splitlines()[0]
        raise DeviceError(f"OpenVINO is installed but does not load: {reason}") from error
    return openvino.Core()


def absent() -> str | None:
    """Return why OpenVINO cannot run here, or None."""
    return NOT_INSTALLED if find_spec("openvino") is None else None


def version() -> str:
    """Return the version of OpenVINO: ``2026.4.1``.

    Raises:
        DeviceError: it is not installed.
    """
    _core()
    import openvino

    return str(openvino.__version__).partition("-")[0]


class OpenVinoSession:
    """Model compiled for the CPU, with the interface of an onnxruntime session.

    Args:
        model: path of an ONNX file, or a serialized model.
        threads: threads inside operators; None: OpenVINO's default.
        precision: type of float kernels, "f32" or "bf16"; None: OpenVINO's default, bf16 on CPUs that have it.

    Raises:
        ModelError: OpenVINO rejects the model.
        DeviceError: see `_core`.
    """

    def __init__(self, model: Path | bytes, threads: int | None = None, *, precision: str | None = None) -> None:
        core, settings = _core(), {"PERFORMANCE_HINT": "LATENCY"}
        if threads is not None:
            settings["INFERENCE_NUM_THREADS"] = str(threads)
        if precision is not None:
            settings["INFERENCE_PRECISION_HINT"] = precision
        try:
            read = core.read_model(native_source(model) if isinstance(model, Path) else model)
            self._compiled = core.compile_model(read, "CPU", settings)
        except Exception as error:  # OpenVINO raises RuntimeError and its own exceptions, without a common base
            name = model if isinstance(model, Path) else "the model"
            raise ModelError(f"OpenVINO refuses {name}: {reason(error)}") from error
        proto = onnx.load(model, load_external_data=False) if isinstance(model, Path) else onnx.load_from_string(model)
        outputs = [value.name for value in proto.graph.output]
        names = [parameter.get_friendly_name() for parameter in read.get_parameters()]
        self._inputs = [_entry(name, port) for name, port in zip(names, self._compiled.inputs, strict=True)]
        self._outputs = [_entry(name, port) for name, port in zip(outputs, self._compiled.outputs, strict=True)]
        self._request = self._compiled.create_infer_request()

    def get_inputs(self) -> Sequence[Entry]:
        """Return the inputs in the order of the file."""
        return self._inputs

    def get_outputs(self) -> Sequence[Entry]:
        """Return the outputs in the order of the file."""
        return self._outputs

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, Any]) -> list[Any]:
        """Run the model and return the named outputs, or all; inputs that are missing in `feeds` raise KeyError."""
        results = self._request.infer([_readable(feeds[entry.name]) for entry in self._inputs], share_inputs=True)
        outputs = {entry.name: results[place] for place, entry in enumerate(self._outputs)}
        return [outputs[name] for name in (outputs if names is None else names)]

    def layers(self) -> list[ExecutedLayer]:
        """Return the kernels of the executed graph."""
        layers = []
        for node in self._compiled.get_runtime_model().get_ordered_ops():
            facts = node.get_rt_info()
            kind, precision, primitive = (
                _text(facts, key) for key in ("layerType", "runtimePrecision", "primitiveType")
            )
            if kind in IDLE:
                continue
            originals = _text(facts, "originalLayersNames").split(",")
            integer = precision in INTEGER_CODES and primitive.lower().endswith("i8")
            layers.append(ExecutedLayer(kind, frozenset(RENAMED.sub("", name) for name in originals if name), integer))
        return layers

    def fallback(self) -> tuple[str, ...]:
        """Return no nodes: all run in OpenVINO."""
        return ()


def _readable(values: Array) -> Array:
    """Return an array of the type that OpenVINO knows: NumPy has two of 64 bits, and onnxruntime writes the other."""
    return values.view(np.int64) if values.dtype == np.int64 else values


def _text(facts: Mapping[str, Any], key: str) -> str:
    if key not in facts:
        return ""
    value = facts[key]
    return str(value.astype(str)) if hasattr(value, "astype") else str(value)


def _entry(name: str, port: Any) -> Entry:
    shape = tuple(None if size.is_dynamic else int(size.get_length()) for size in port.get_partial_shape())
    kind = port.get_element_type().get_type_name()
    return Entry(name, f"tensor({TYPES.get(kind, kind)})", shape)


def reason(error: BaseException) -> str:
    """Return the line of an OpenVINO error that says what is wrong: the first one that is no source location."""
    lines = [line.strip(" -") for line in str(error).splitlines() if line.strip(" -")]
    told = [line for line in lines if not line.startswith(("Exception from ", "Check '")) and not line.endswith(":")]
    return (told or lines or [type(error).__name__])[0]


OPENVINO_RUNTIME: Final = Runtime(
    "OpenVINO", absent, OpenVinoSession, name="openvino", open_float32=partial(OpenVinoSession, precision="f32")
)
