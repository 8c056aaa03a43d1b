"""Child process of `child_session`: ``python engine_process.py ENGINE FOLDER``, with an engine of `OPENERS`.

It runs in an interpreter that may have nothing of sbonnx's dependencies: of sbonnx it imports `system` alone.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

ERRORS: Final = 4
"""Maximum number of refused nodes that a message names."""

Run = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class _Refusal(Exception):
    """Raised for a model that the parser or builder rejects."""


def _provider(model: bytes, *, package: str, settings: Mapping[str, str]) -> tuple[list[str], Run]:
    """Open a model in an execution provider of a package.

    Args:
        package: has ``get_library_path`` and ``get_ep_name``.
        settings: of the provider.

    Returns:
        The nodes that run on the CPU, and the function that runs a feed.
    """
    from sbonnx.system.runtime import RECORD_PROVIDERS, nodes_elsewhere, onnxruntime, open_session, session_options

    ort, plugin = onnxruntime(), importlib.import_module(package)
    name = plugin.get_ep_name()
    ort.register_execution_provider_library(name, plugin.get_library_path())
    devices = [device for device in ort.get_ep_devices() if device.ep_name == name]
    if not devices:
        raise _Refusal(f"{name} has no device here")
    options = session_options()
    options.add_session_config_entry(*RECORD_PROVIDERS)
    options.add_provider_for_devices(devices[:1], dict(settings))
    session = open_session(model, options, ())
    return list(nodes_elsewhere(session, name)), _running(session)


def _processor(model: bytes) -> tuple[list[str], Run]:
    """Open a model on the CPU; return no nodes, and the function that runs a feed."""
    from sbonnx.system.runtime import open_session, session_options

    return [], _running(open_session(model, session_options(threads=1)))


def _running(session: Any) -> Run:
    names = [entry.name for entry in session.get_outputs()]
    return lambda feeds: dict(zip(names, session.run(names, dict(feeds)), strict=True))


def _load_libraries(package: str, pattern: str) -> None:
    """Load shared libraries of a package, so that extension modules find them."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        spec = None  # as a rule the system has the libraries
    for folder in () if spec is None else spec.submodule_search_locations or ():
        for library in sorted(Path(folder).glob(pattern)):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def load_rtx_libraries() -> None:
    """Load the libraries of TensorRT-RTX and of CUDA's runtime out of their wheels."""
    _load_libraries("nvidia", "*/lib/libcudart.so*")
    _load_libraries("tensorrt_rtx_libs", "*.so*")


def _rtx(model: bytes, on_gpu: bool = False) -> tuple[list[str], Run | None]:
    """Build an engine of a model; return no nodes, and the function that runs a feed on the first GPU, or None."""
    load_rtx_libraries()
    import tensorrt_rtx_bindings as trt

    builder = trt.Builder(log := trt.Logger(trt.Logger.INTERNAL_ERROR))
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, log)
    if not parser.parse(model):
        errors = map(parser.get_error, range(parser.num_errors))
        texts = [f"{error.node_operator()} '{error.node_name()}': {error.desc()}" for error in errors]
        more = f"; {len(texts) - ERRORS} more" if len(texts) > ERRORS else ""
        raise _Refusal("; ".join(texts[:ERRORS]) + more)
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.CURRENT if on_gpu else trt.ComputeCapability.SM89, 0)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise _Refusal("it is parsed, and no engine can be built")
    return [], _rtx_run(trt, log, bytes(plan)) if on_gpu else None


def _rtx_run(trt: Any, log: Any, plan: bytes) -> Run:
    """Load an engine on the first GPU; return the function that runs a feed."""
    import numpy as np

    from sbonnx.system.nvidia import DeviceMemory, use_first_gpu

    use_first_gpu()
    engine = trt.Runtime(log).deserialize_cuda_engine(plan)
    if engine is None:
        raise _Refusal("an engine is built, and this GPU does not load it")
    context = engine.create_execution_context()
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    outputs = [name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.OUTPUT]

    def run(feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        buffers, arrays = {}, {}
        for name in names:
            shape, kind = tuple(context.get_tensor_shape(name)), trt.nptype(engine.get_tensor_dtype(name))
            arrays[name] = np.zeros(shape, kind) if name in outputs else feeds[name].astype(kind, copy=False)
            buffers[name] = DeviceMemory(arrays[name].nbytes)
            buffers[name].write(arrays[name].tobytes())
            context.set_tensor_address(name, buffers[name].address)
        if not context.execute_async_v3(0):
            raise _Refusal("the engine does not run")
        return {
            name: np.frombuffer(buffers[name].read(), arrays[name].dtype).reshape(arrays[name].shape)
            for name in outputs
        }

    return run


OPENERS: Final[dict[str, Callable[[bytes], tuple[list[str], Run | None]]]] = {
    "cpu": _processor,
    "qnn": partial(_provider, package="onnxruntime_qnn", settings={"backend_type": "htp"}),
    "webgpu": partial(_provider, package="onnxruntime_ep_webgpu", settings={}),
    "rtx": _rtx,
    "rtx-gpu": partial(_rtx, on_gpu=True),
}
"""Functions that open a model, by name of the engine."""


def _run(run: Run, folder: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run the feed that `rows` describe; write its outputs and describe them."""
    import numpy as np

    feeds = {}
    for number, row in enumerate(rows):
        values = np.frombuffer((folder / f"in{number}.bin").read_bytes(), row["type"])
        feeds[row["name"]] = values.reshape(row["dims"])
    answers = []
    for number, (name, values) in enumerate(run(feeds).items()):
        (folder / f"out{number}.bin").write_bytes(np.ascontiguousarray(values).tobytes())
        answers.append({"name": name, "type": str(values.dtype), "dims": list(values.shape)})
    return answers


def _serve(engine: str, folder: Path) -> None:
    """Open the model, then run a feed for each line of the input."""
    from sbonnx.system.runtime import reason

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print to the output

    def reply(answer: Callable[[], dict[str, Any]]) -> bool:
        try:
            value = answer()
        except Exception as error:  # of third parties, which share no base class; the message is the answer
            value = {"error": " ".join(reason(error).split())[:600]}
        answers.write(json.dumps(value) + "\n")
        return "error" not in value

    run: Run | None = None

    def open_model() -> dict[str, Any]:
        nonlocal run
        fallback, run = OPENERS[engine]((folder / "model.onnx").read_bytes())
        return {"fallback": fallback}

    if not reply(open_model) or run is None:
        return
    execute: Run = run
    for line in sys.stdin:
        rows = json.loads(line)
        reply(lambda rows=rows: {"outputs": _run(execute, folder, rows)})  # type: ignore[misc]


if __name__ == "__main__":
    sys.path[0] = ""
    sys.path.append(str(Path(__file__).resolve().parents[2]))  # last: the interpreter's own packages come first
    _serve(sys.argv[1], Path(sys.argv[2]))
