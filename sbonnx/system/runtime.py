"""onnxruntime: the only module that imports it and opens sessions, and only when something is run.

onnxruntime is an optional extra (`cpu` or `gpu`, which exclude each other), so importing sbonnx never imports it.

From 1.29 on, onnxruntime's builds for Linux and macOS send telemetry by default: importing it starts an upload thread
and writes a device id below ~/.cache/Microsoft and a session file to TMPDIR. The environment variable below, read
once at import, prevents all of that, in child processes too.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from types import ModuleType
from typing import Any, Final

from sbonnx.errors import NO_RUNTIME, DeviceError, MissingPackageError, UnknownOperatorError
from sbonnx.system.cpu import CPU, CUDA, target_cpu
from sbonnx.system.lowerings import lowerings
from sbonnx.system.nvidia import gpu_count

TELEMETRY_SWITCH: Final = "ORT_DISABLE_TELEMETRY"
"""Environment variable that turns onnxruntime's telemetry off. A value set by the user is respected, "0" included."""

LEVELS: Final[dict[str, str]] = {
    "off": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
    "kept": "ORT_DISABLE_ALL",
}
"""onnxruntime's optimisation levels. "kept": the model was optimised already."""

_LOGGED: Final = re.compile(r"\S+\.(?:cc|h):\d+\s.*?\)\s+|\[ONNXRuntimeError\] : \d+ : \w+ : ")
"""Source locations and error codes at the start of onnxruntime's messages."""


def _set_telemetry_switch() -> None:
    if not os.environ.get(TELEMETRY_SWITCH):
        os.environ[TELEMETRY_SWITCH] = "1"


_set_telemetry_switch()  # for direct imports of onnxruntime: a preload of worker processes, a user's metric


@cache
def _disable_events(ort: ModuleType) -> None:
    """Disable telemetry events if the calling program imported onnxruntime before, and on Windows (ETW)."""
    if os.environ[TELEMETRY_SWITCH] != "0" and hasattr(ort, "disable_telemetry_events"):
        ort.disable_telemetry_events()


def onnxruntime() -> ModuleType:
    """Import onnxruntime with its telemetry disabled.

    Raises:
        DeviceError: it is not installed, or does not load on this machine.
    """
    _set_telemetry_switch()  # again: the environment may have been replaced since this module was loaded
    try:
        import onnxruntime as ort
    except ModuleNotFoundError as error:
        if error.name != "onnxruntime":
            raise
        raise MissingPackageError(NO_RUNTIME) from error
    except ImportError as error:
        reason = str(error).splitlines()[0]
        raise DeviceError(f"onnxruntime is installed but does not load: {reason}") from error
    if not hasattr(ort, "InferenceSession"):
        raise DeviceError(
            "onnxruntime is only half installed (a removed onnxruntime-gpu leaves such a folder): "
            "pip install --force-reinstall 'sbonnx[cpu]'"
        )
    module: ModuleType = ort
    _disable_events(module)
    return module


@cache
def load_cuda_libraries() -> None:
    """Load CUDA's libraries out of the wheels that ``onnxruntime-gpu[cuda,cudnn]`` installs, if they are installed.

    Without it onnxruntime finds those of the system alone. What is missing shows in `require_device`.
    """
    ort = onnxruntime()
    if hasattr(ort, "preload_dlls"):
        with contextlib.redirect_stdout(io.StringIO()):  # a line for each library that is not in a wheel
            ort.preload_dlls()


def require_device(device: str, provider: str) -> None:
    """Check that a session runs on the device that was asked for.

    Args:
        device: as in settings, "cuda" or "cuda:1".
        provider: first execution provider of the session.

    Raises:
        DeviceError: onnxruntime fell back to the CPU, which it does without an error.
    """
    if device.startswith("cuda") and provider != CUDA:
        raise DeviceError(
            f"device '{device}' was asked for and onnxruntime fell back to {provider}: its CUDA libraries do not load; "
            "pip install 'sbonnx[gpu]' installs them, the driver must be as new as they are; or use device 'cpu'"
        )


EXACT_PRODUCTS: Final = ("session.x64quantprecision", "1")
"""Session option for kernels of x86 that add 8-bit products without saturation, as other CPUs do.

onnxruntime then stores int8 weights as uint8, whose kernels are slower. It does so on CPUs that need it not, too.
"""


RECORD_PROVIDERS: Final = ("session.record_ep_graph_assignment_info", "1")
"""Session option for `get_provider_graph_assignment_info`: which execution provider computes which nodes."""


LIBRARIES: Final = "SBONNX_ORT_LIBRARIES"
"""Environment variable with the libraries of custom operators, which child processes inherit."""

WITHOUT_KERNELS: Final = "onnxruntime cannot run these types here, as bfloat16 on a CPU: export the model as float32"
"""Fix of an operator without a kernel for its types, or of an input that numpy cannot hand over."""

_TYPES: Final = re.compile("Could not find an implementation for|Numpy_type [0-9]+ can't be converted")

_LOWERED: Final = re.compile(
    "Could not find an implementation for (?:DequantizeLinear|Swish)"
    "|Unsupported model IR version|Current official support for domain"
)
"""Errors of models that `lowerings` may help."""

_UNREGISTERED: Final = re.compile(r"(?P<domain>[\w.]*):(?P<op>\w+)\(-?\d+\) is not a registered function/op")


def use_libraries(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Let all later sessions of this process, and of its child processes, load libraries of custom operators.

    Args:
        paths: shared libraries that export ``RegisterCustomOps``; they are added to those of earlier calls.

    Raises:
        DeviceError: a path is no file, or onnxruntime cannot load it.
    """
    libraries = _libraries()
    for path in map(os.path.abspath, paths):
        if not os.path.isfile(path):
            raise DeviceError(f"'{path}' does not exist: --ort-library takes a library of custom operators")
        try:
            onnxruntime().SessionOptions().register_custom_ops_library(path)
        except Exception as error:  # onnxruntime's exceptions share no base class
            raise DeviceError(f"onnxruntime cannot load custom operators from '{path}': {reason(error)}") from error
        libraries = libraries if path in libraries else (*libraries, path)
    os.environ[LIBRARIES] = os.pathsep.join(libraries)


@contextlib.contextmanager
def libraries_of(paths: Iterable[str | os.PathLike[str]]) -> Iterator[None]:
    """Load libraries of custom operators for the sessions inside alone; otherwise as `use_libraries`."""
    before = os.environ.get(LIBRARIES, "")
    try:
        if paths := tuple(paths):
            use_libraries(paths)
        yield
    finally:
        os.environ[LIBRARIES] = before


def _libraries() -> tuple[str, ...]:
    return tuple(filter(None, os.environ.get(LIBRARIES, "").split(os.pathsep)))


def session_options(level: str = "all", *, threads: int | None = None, exact: bool = False) -> Any:
    """Create session options: no log, no spinning threads, and the libraries of `use_libraries`.

    Idle pools that spin cost more than the work where there are many sessions.

    Args:
        level: key of `LEVELS`.
        threads: threads inside operators; None: number of cores.
        exact: 8-bit products do not saturate; sets `EXACT_PRODUCTS` where this CPU's do.
    """
    ort = onnxruntime()
    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors are raised as well, and warnings are for the model's author
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, LEVELS[level])
    options.inter_op_num_threads = 1
    if exact and not target_cpu().exact:
        options.add_session_config_entry(*EXACT_PRODUCTS)
    for path in _libraries():
        options.register_custom_ops_library(path)
    if threads is not None:
        options.intra_op_num_threads = threads
    for pool in ("intra_op", "inter_op"):
        options.add_session_config_entry(f"session.{pool}.allow_spinning", "0")
    return options


def open_session(
    model: str | bytes,
    options: Any,
    providers: Sequence[Any] = (CPU,),
    *,
    disabled: Sequence[str] = (),
    lowered: bool = True,
) -> Any:
    """Open an onnxruntime session; the only place that does. A model that does not load: see `lowerings`.

    onnxruntime's exceptions have no common base but Exception; see `reason` for their text.

    Args:
        model: path, or serialized model.
        options: see `session_options`.
        providers: execution providers.
        disabled: names of graph transformers that do not run.
        lowered: whether a model that does not load is rewritten by `lowerings`.

    Raises:
        UnknownOperatorError: a custom operator is not registered. Other errors are onnxruntime's.
    """
    ort, given = onnxruntime(), {"providers": list(providers), "disabled_optimizers": list(disabled)}
    try:
        return ort.InferenceSession(model, options, **given)
    except Exception as error:  # onnxruntime's exceptions share no base class
        unregistered = _UNREGISTERED.search(str(error))
        if unregistered is None:
            simpler = [lower(model) for lower in lowerings] if lowered and _LOWERED.search(str(error)) else []
            if not any(simpler):
                raise
            return open_session(next(filter(None, simpler)), options, providers, disabled=disabled)
        raise UnknownOperatorError(unregistered["domain"], unregistered["op"]) from error


def loads(model: bytes) -> bool:
    """Return whether onnxruntime loads a serialized model as it is.

    Raises:
        DeviceError: as `onnxruntime`.
    """
    options = session_options("off", threads=1)
    try:
        open_session(model, options, lowered=False)
    except Exception:  # onnxruntime's exceptions share no base class
        return False
    return True


def reason(error: BaseException) -> str:
    """Return the first useful line of an onnxruntime error, with a fix for types that it has no kernels for."""
    text = _LOGGED.sub("", str(error)).strip()
    line = text.splitlines()[0].strip() if text else type(error).__name__
    return f"{line}: {WITHOUT_KERNELS}" if _TYPES.search(line) else line


def best_device() -> str:
    """Resolve the device "auto": "cuda" if onnxruntime supports it and there is a GPU, else "cpu"."""
    return "cuda" if CUDA in onnxruntime().get_available_providers() and gpu_count() else "cpu"


def version() -> tuple[int, int]:
    """Return major and minor version of onnxruntime.

    Raises:
        DeviceError: as `onnxruntime`.
    """
    major, minor = onnxruntime().__version__.split(".")[:2]
    return int(major), int(minor)


def nodes_elsewhere(session: Any, provider: str) -> tuple[str, ...]:
    """Return the nodes that another provider than `provider` computes, of a session opened with `RECORD_PROVIDERS`.

    Raises:
        DeviceError: it computes none.
    """
    parts = session.get_provider_graph_assignment_info()
    if all(part.ep_name != provider for part in parts):
        raise DeviceError(f"{provider} computes none of the nodes: onnxruntime computes all of them on the CPU")
    return tuple(node.name for part in parts if part.ep_name != provider for node in part.get_nodes())
