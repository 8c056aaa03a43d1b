"""Lazy import of onnxruntime: the only module that imports it, and only when something is run.

onnxruntime is an optional extra (`cpu` or `gpu`, which exclude each other), so importing sbonnx never imports it.

From 1.29 on, onnxruntime's builds for Linux and macOS send telemetry by default: importing it starts an upload thread
and writes a device id below ~/.cache/Microsoft and a session file to TMPDIR. The environment variable below, read
once at import, prevents all of that, in child processes too.
"""

from __future__ import annotations

import os
from functools import cache
from types import ModuleType
from typing import Final

from sbonnx.errors import NO_RUNTIME, DeviceError

TELEMETRY_SWITCH: Final = "ORT_DISABLE_TELEMETRY"
"""Environment variable that turns onnxruntime's telemetry off. A value set by the user is respected, "0" included."""


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
        raise DeviceError(NO_RUNTIME) from error
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


def best_device() -> str:
    """Resolve the device "auto": "cuda" if onnxruntime supports it, else "cpu"."""
    return "cuda" if "CUDAExecutionProvider" in onnxruntime().get_available_providers() else "cpu"


def version() -> tuple[int, int]:
    """Return major and minor version of onnxruntime.

    Raises:
        DeviceError: as `onnxruntime`.
    """
    major, minor = onnxruntime().__version__.split(".")[:2]
    return int(major), int(minor)
