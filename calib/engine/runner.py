"""`LayerRunner`: onnxruntime session over a graph, or a piece of one, that is closed explicitly."""

from __future__ import annotations

import mmap
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import onnx

from sbonnx.backends.onnxruntime.graph_transformers import broken_rewrites
from sbonnx.calib.engine.session import Session, SessionModel, opened, options_for, ort_values
from sbonnx.errors import DeviceError, ModelError
from sbonnx.graph import Graph, serialize
from sbonnx.graph.storage.temporary import temporary_folder
from sbonnx.options import RunOptions
from sbonnx.spec import Array
from sbonnx.system.cpu import CPU, CUDA, cores
from sbonnx.system.runtime import best_device, load_cuda_libraries, onnxruntime, require_device

CUDA_OPTIONS: Final = {"use_tf32": "0", "cudnn_conv_algo_search": "HEURISTIC"}
"""TF32 has 10 bits of mantissa: too few to measure ranges. The exhaustive search of algorithms, onnxruntime's default,
chooses by time, so that results differ from run to run, and takes longer: calibration of MobileNetV2 with 256 samples
takes 3.3 s on an H200, 2.7 s by heuristics; without either it did not end in 100 s."""

REORDER: Final = "ReorderOutput"
DOMAIN: Final = "com.microsoft.nchwc"

BLOCK: Final = 16
"""Largest block. Channels are padded to whole blocks; without padding the elements are those of the tensor."""


def weights_beside(model: onnx.ModelProto, path: Path) -> dict[str, Array]:
    """Read the weights of a model from the external file at `path`, by name, into page-aligned memory."""
    size = path.stat().st_size if path.exists() else 0
    if not size:
        return {}
    memory = mmap.mmap(-1, size)
    with path.open("rb") as file:
        file.readinto(memory)  # type: ignore[attr-defined, unused-ignore]
    content = np.frombuffer(memory, np.uint8)
    weights: dict[str, Array] = {}
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            place = {entry.key: entry.value for entry in tensor.external_data}
            start, length = int(place.get("offset", 0)), int(place["length"])
            kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
            weights[tensor.name] = content[start : start + length].view(kind).reshape(tuple(tensor.dims))
    return weights


def unblocked(model: onnx.ModelProto, outputs: Collection[str]) -> tuple[bytes, dict[str, str]]:
    """Change an optimised model to return `outputs` in the native layout if their elements are the same.

    Args:
        model: as onnxruntime wrote it after optimising; is changed.
        outputs: those whose elements may be in any order.

    Returns:
        The serialized model, and the name there of each renamed output.
    """
    graph = model.graph
    makers = {name: node for node in graph.node for name in node.output}
    read = Counter(name for node in graph.node for name in node.input)
    aliases: dict[str, str] = {}
    idle = []
    for value in graph.output:
        node = makers.get(value.name)
        if value.name not in outputs or node is None or (node.op_type, node.domain) != (REORDER, DOMAIN):
            continue
        channels = next(attribute.i for attribute in node.attribute if attribute.name == "channels")
        source = node.input[0]
        if channels % BLOCK or source in aliases.values():
            continue
        aliases[value.name] = source
        if not read[value.name]:
            idle.append(node)
        value.name = source
        value.type.tensor_type.ClearField("shape")
    for node in idle:
        graph.node.remove(node)
    return model.SerializeToString(), aliases


Optimisation = Literal["off", "basic", "extended", "all"]

DEVICES: Final = ("cpu", "cuda", "cuda:N", "auto")


def providers(device: str) -> list[Any]:
    """Return the execution providers of a device.

    Args:
        device: "cpu", "cuda", "cuda:1", or "auto", see `sbonnx.system.runtime.best_device`.

    Raises:
        DeviceError: no such device, or onnxruntime was built without it.
    """
    matched = re.fullmatch(r"cpu|auto|cuda(?::(\d+))?", device)
    if not matched:
        raise DeviceError(f"there is no device '{device}'; there are {', '.join(DEVICES)}")
    if (best_device() if device == "auto" else device) == "cpu":
        return [CPU]
    available = onnxruntime().get_available_providers()
    if CUDA not in available:
        raise DeviceError(
            f"device '{device}' needs {CUDA}, which this onnxruntime does not have ({', '.join(available)}): "
            "pip install 'sbonnx[gpu]', or use device 'cpu'"
        )
    load_cuda_libraries()
    # the id of the first device is left out: onnxruntime-gpu 1.31 prints a warning for each session that names one
    other = {} if matched[1] in (None, "0") else {"device_id": matched[1]}
    return [(CUDA, {**CUDA_OPTIONS, **other}), CPU]


def settings(device: str) -> dict[str, str]:
    """Return the settings that affect the last bits of the results, in addition to the model and the data."""
    first = providers(device)[0]
    name = first if isinstance(first, str) else first[0]
    return {"onnxruntime": onnxruntime().__version__, "provider": name, "optimisation": "all"}


def samples_at_once(options: RunOptions) -> int:
    """Return the number of samples to run at a time: as requested, else one per core, or one on a GPU."""
    return options.threads or (cores() if providers(options.device)[0] == CPU else 1)


class LayerRunner(Session):
    """Session over `graph`. Must be closed.

        with LayerRunner(graph, device="cpu", threads=1) as run:
            y = run(feeds)["y"]

    A runner may be called from several threads at once (not on CUDA). With one thread inside operators the results do
    not depend on the number of cores; with more, sums are split differently and the last bits may differ.

    Args:
        graph: the model; its large weights are shared with the session, not copied.
        device: see `providers`.
        threads: threads inside operators; None: number of cores.
        optimisation: onnxruntime's level. "off" runs the operators unchanged, weights not packed.
        name: name of the model in messages; None: "the model", with the path of its file if it has one.
        any_layout: outputs whose elements may be in any order; see `sbonnx.calib.engine.runner`. Such a runner costs
            more to open and less to run.

    Raises:
        ModelError: onnxruntime rejects the model.
        DeviceError: the device does not exist or does not work.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        device: str = "cpu",
        threads: int | None = None,
        optimisation: Optimisation = "all",
        name: str | None = None,
        any_layout: Collection[str] = (),
    ) -> None:
        chosen = providers(device)
        path = graph.info.path
        name = name or ("the model" if path is None else f"the model '{path}'")
        self._graph, self._level = graph, optimisation
        build = partial(_session_model, graph, chosen, threads=threads, optimisation=optimisation, name=name)
        self._build = partial(build, any_layout=any_layout)
        try:
            super().__init__(self._build(), chosen, threads=threads, name=name)
        except ModelError:
            model = self._repaired(None)
            if model is None:
                raise
            super().__init__(model, chosen, threads=threads, name=name)
        try:
            require_device(device, self.provider)
        except DeviceError:
            self.close()
            raise

    def _repaired(self, feeds: Mapping[str, Array] | None) -> SessionModel | None:
        """Leave out the rewrites of onnxruntime that fail, if the graph as stored runs `feeds` (None: opens).

        They are added to `broken_rewrites` of the graph, which later sessions leave out.
        """
        disabled = self._graph.info.broken_rewrites
        if self._level == "off":
            return None
        if self.disabled != tuple(disabled):  # another session found them
            return self._build()
        content, weights = serialize(self._graph)
        values = ort_values(weights)

        def attempt(names: Sequence[str]) -> None:
            options = options_for(self._threads, self._level, values, self._chosen)
            session = opened(content, options, self._chosen, self.name, (*disabled, *names))
            if feeds is not None:
                session.run(None, {spec.name: feeds[spec.name] for spec in self.input_specs if spec.name in feeds})

        broken = broken_rewrites(attempt)
        disabled.extend(broken)
        return self._build() if broken else None


def _session_model(
    graph: Graph,
    chosen: Sequence[Any],
    *,
    threads: int | None = None,
    optimisation: Optimisation = "all",
    name: str = "the model",
    any_layout: Collection[str] = (),
) -> SessionModel:
    """Build the model of a `LayerRunner` session.

    Args:
        chosen: execution providers.
        threads, optimisation, name, any_layout: see `LayerRunner`.

    Raises:
        ModelError: onnxruntime rejects the model.
    """
    content, weights = serialize(graph)
    plain = SessionModel(content, weights, optimisation, disabled=tuple(graph.info.broken_rewrites))
    if not any_layout or list(chosen) != [CPU] or optimisation != "all":
        return plain
    options = partial(options_for, threads, optimisation, ort_values(weights), chosen)
    try:
        return _blocked(plain, options, any_layout, name)
    except (ModelError, OSError):  # for example a full disk; an error of the model itself is raised when it is opened
        return plain


def _blocked(model: SessionModel, options: Callable[[], Any], outputs: Collection[str], name: str) -> SessionModel:
    """Return `model` as optimised by onnxruntime, with `outputs` taken before they are reordered."""
    with temporary_folder() as folder:
        path, beside = folder / "optimised.onnx", "weights.bin"
        chosen = options()
        chosen.optimized_model_filepath = str(path)
        # weights are most of the model, and are neither packed into protobuf nor read back from it
        chosen.add_session_config_entry("session.optimized_model_external_initializers_file_name", beside)
        chosen.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
        chosen.add_session_config_entry("session.disable_prepacking", "1")  # this session is not run
        opened(model.content, chosen, [CPU], name, model.disabled)
        proto = onnx.load(path, load_external_data=False)
        weights = weights_beside(proto, folder / beside)
        content, aliases = unblocked(proto, outputs)
        return SessionModel(content, weights, "kept", aliases)
