"""WebGPU kernels of onnxruntime-web, as a plug-in provider for Python: on a GPU, or on SwiftShader without one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from sbonnx.backends.runtime_types import Runtime
from sbonnx.runtimes.child_session import ChildSession, missing_packages, python_program

PYTHON: Final = "SBONNX_WEBGPU_PYTHON"
"""Environment variable with the Python interpreter that has onnxruntime-ep-webgpu; without it, the running one."""

DRIVERS: Final = ("VK_DRIVER_FILES", "VK_ICD_FILENAMES")
"""Environment variables that name Vulkan drivers."""

DEVICES: Final = Path("/dev")
GPUS: Final = ("dri/card*", "nvidiactl", "dxg")
"""GPUs among devices. Drivers may be installed without one: Mesa's driver for the CPU is no adapter of WebGPU."""

SOFTWARE: Final = tuple(
    Path(folder, name, "vk_swiftshader_icd.json")
    for folder in ("/usr/lib", "/usr/lib64", "/opt")
    for name in ("chromium", "chromium-browser", "google/chrome")
)
"""Places of SwiftShader, which computes Vulkan on the CPU; browsers have it."""

TITLE: Final = "onnxruntime, WebGPU"

NOT_INSTALLED: Final = (
    f"onnxruntime-ep-webgpu is not installed: pip install onnxruntime onnxruntime-ep-webgpu here, or in an environment "
    f"whose interpreter {PYTHON} names"
)
NO_DRIVER: Final = (
    "there is no Vulkan driver: apt install libvulkan1 chromium, whose SwiftShader needs no GPU, or name a driver "
    f"with {DRIVERS[0]}"
)


def _driver() -> dict[str, str] | None:
    """Return the environment of a process that finds a Vulkan driver, or None if there is no driver."""
    if any(map(os.environ.get, DRIVERS)) or any(any(DEVICES.glob(name)) for name in GPUS):
        return {}
    software = next((path for path in SOFTWARE if path.is_file()), None)
    return None if software is None else {name: str(software) for name in DRIVERS}


def absent() -> str | None:
    """Return why WebGPU cannot run here, or None."""
    missing = missing_packages(PYTHON, ("onnxruntime", "onnxruntime_ep_webgpu"), NOT_INSTALLED)
    return missing or (NO_DRIVER if _driver() is None else None)


class WebGpuSession(ChildSession):
    """Model opened by the WebGPU provider. Nodes that it has no kernel for run on onnxruntime's CPU, see `fallback`.

    Args:
        model: path of an ONNX file, or a serialized model.
        threads: ignored.

    Raises:
        ModelError: the provider rejects the model, crashes, or does not answer in time.
    """

    def __init__(self, model: Path | bytes, threads: int | None = None) -> None:
        variables = {"ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER": "1", **(_driver() or {})}
        super().__init__(model, python_program(PYTHON, "webgpu"), TITLE, variables=variables)


WEBGPU: Final = Runtime(TITLE, absent, WebGpuSession, name="webgpu")
