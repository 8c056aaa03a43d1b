"""The one door to onnxruntime, opened only when something is run.

onnxruntime is an extra (`cpu` or `gpu`, which exclude each other), so importing sbonnx never imports it.
"""

from __future__ import annotations

from types import ModuleType

from sbonnx.errors import NO_RUNTIME, DeviceError


def onnxruntime() -> ModuleType:
    """The onnxruntime module.

    Raises:
        DeviceError: it is not installed, or does not load on this machine.
    """
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
    return module


def version() -> tuple[int, int]:
    """Major and minor version of onnxruntime.

    Raises:
        DeviceError: see `onnxruntime`.
    """
    major, minor = onnxruntime().__version__.split(".")[:2]
    return int(major), int(minor)
