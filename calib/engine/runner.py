"""`LayerRunner`: a graph, or a piece of one, in an onnxruntime session with a visible life."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Final, Literal

import numpy as np
import onnx

from sbonnx.calib.engine.nchwc import unblocked, weights_beside
from sbonnx.calib.engine.session import CPU, CUDA, LEVELS, Session, SessionModel, open_session, session_options
from sbonnx.errors import DeviceError, ModelError
from sbonnx.graph import Graph, serialize
from sbonnx.graph.storage.temporary import temporary_folder
from sbonnx.runtime import onnxruntime

Optimisation = Literal["off", "basic", "extended", "all"]

DEVICES: Final = ("cpu", "cuda", "cuda:N", "auto")


def providers(device: str) -> list[Any]:
    """Execution providers for `device`: "cpu", "cuda", "cuda:1", or "auto" (cuda where onnxruntime has it, else cpu).

    Raises:
        DeviceError: no such device, or onnxruntime was built without it.
    """
    found = re.fullmatch(r"cpu|auto|cuda(?::(\d+))?", device)
    if not found:
        raise DeviceError(f"there is no device '{device}'; there are {', '.join(DEVICES)}")
    available = onnxruntime().get_available_providers()
    if device == "cpu" or (device == "auto" and CUDA not in available):
        return [CPU]
    if CUDA not in available:
        raise DeviceError(
            f"device '{device}' needs {CUDA}, which this onnxruntime does not have ({', '.join(available)}): "
            "pip install 'sbonnx[gpu]', or use device 'cpu'"
        )
    # TF32 keeps 10 bits of mantissa: too few to measure ranges with
    return [(CUDA, {"device_id": found[1] or "0", "use_tf32": "0"}), CPU]


def settings(device: str) -> dict[str, str]:
    """What the last bits of a run's numbers depend on, beside the model and the data."""
    first = providers(device)[0]
    name = first if isinstance(first, str) else first[0]
    return {"onnxruntime": onnxruntime().__version__, "provider": name, "optimisation": "all"}


class LayerRunner(Session):
    """A session over `graph`, to be closed.

        with LayerRunner(graph, device="cpu", threads=1) as run:
            y = run(feeds)["y"]

    One runner may be called from several threads at once (not on CUDA). With one thread inside operators the numbers
    do not depend on the machine's cores; with more, sums are cut differently and the last bits may differ.

    Args:
        graph: the model; its large weights are shared with the session, not copied.
        device: see `providers`.
        threads: threads inside operators; None: as many as cores.
        optimisation: onnxruntime's level. "off" runs the operators as they stand, weights not packed.
        name: what to call the model in messages.
        any_layout: outputs whose elements may come in any order; see `sbonnx.calib.engine.nchwc`. Such a runner costs
            more to open and less to run.

    Raises:
        ModelError: onnxruntime refuses the model.
        DeviceError: the device is not there, or does not work.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        device: str = "cpu",
        threads: int | None = None,
        optimisation: Optimisation = "all",
        name: str = "the model",
        any_layout: Collection[str] = (),
    ) -> None:
        chosen = providers(device)
        model = prepare(graph, chosen, threads=threads, optimisation=optimisation, name=name, any_layout=any_layout)
        super().__init__(model, chosen, threads=threads, name=name)
        if device.startswith("cuda") and self.provider != CUDA:
            self.close()
            raise DeviceError(
                f"device '{device}' was asked for and onnxruntime fell back to {self.provider}: its CUDA libraries do "
                "not load; check the driver, CUDA and cuDNN versions, or use device 'cpu'"
            )


def prepare(
    graph: Graph,
    chosen: Sequence[Any],
    *,
    threads: int | None = None,
    optimisation: Optimisation = "all",
    name: str = "the model",
    any_layout: Collection[str] = (),
) -> SessionModel:
    """What `LayerRunner` opens a session over, which another process can do as well.

    Args:
        chosen: execution providers.
        threads, optimisation, name, any_layout: see `LayerRunner`.

    Raises:
        ModelError: onnxruntime refuses the model.
    """
    content, weights = serialize(graph)
    if not any_layout or list(chosen) != [CPU] or optimisation != "all":
        return SessionModel(content, weights, optimisation)
    ort = onnxruntime()
    values = {n: ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(w)) for n, w in weights.items()}
    options = partial(session_options, threads, optimisation, values, chosen)
    try:
        return _blocked(content, options, any_layout, name)
    except (ModelError, OSError):  # no room to write it, say; if the model itself is at fault, opening it says so
        return SessionModel(content, weights, optimisation)


def _blocked(model: bytes, options: Callable[[], Any], outputs: Collection[str], name: str) -> SessionModel:
    """`model` as onnxruntime optimised it, with `outputs` taken before they are put back into the usual order."""
    with temporary_folder() as folder:
        path, beside = folder / "optimised.onnx", "weights.bin"
        chosen = options()
        chosen.optimized_model_filepath = str(path)
        # the weights are the bulk of it, and are neither packed into protobuf nor read back from there
        chosen.add_session_config_entry("session.optimized_model_external_initializers_file_name", beside)
        chosen.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
        chosen.add_session_config_entry("session.disable_prepacking", "1")  # this one is not run
        open_session(model, chosen, [CPU], name)
        proto = onnx.load(path, load_external_data=False)
        weights = weights_beside(proto, folder / beside)
        content, aliases = unblocked(proto, outputs)
        return SessionModel(content, weights, "kept", aliases)


__all__ = ["CPU", "CUDA", "LEVELS", "LayerRunner", "Optimisation", "prepare", "providers", "settings"]
