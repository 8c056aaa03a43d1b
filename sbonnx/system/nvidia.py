"""NVIDIA's driver, by its C interface: whether there is a GPU, and memory on it. Needs no CUDA package."""

from __future__ import annotations

import ctypes
import sys
import weakref
from functools import cache
from typing import Any, Final

LIBRARY: Final = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"

_CAPABILITY: Final = (75, 76)
"""``CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR`` and ``MINOR``."""


class DriverError(RuntimeError):
    """Raised for a call of the driver that fails."""


@cache
def _driver() -> Any:
    """Load the driver and initialize it; None where there is none."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    return library if library.cuInit(0) == 0 else None


def gpu_count() -> int:
    """Return the number of NVIDIA GPUs that this process may use."""
    library, count = _driver(), ctypes.c_int(0)
    if library is None or library.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def compute_capability() -> tuple[int, int] | None:
    """Return the compute capability of the first GPU, such as (8, 9); None without one."""
    if not gpu_count():
        return None
    device, parts = ctypes.c_int(0), [ctypes.c_int(0), ctypes.c_int(0)]
    _call("cuDeviceGet", ctypes.byref(device), 0)
    for part, attribute in zip(parts, _CAPABILITY, strict=True):
        _call("cuDeviceGetAttribute", ctypes.byref(part), attribute, device)
    return parts[0].value, parts[1].value


def _call(name: str, *arguments: Any) -> None:
    library = _driver()
    if library is None:
        raise DriverError(f"{LIBRARY} is not there")
    if code := getattr(library, name)(*arguments):
        text = ctypes.c_char_p()
        library.cuGetErrorString(code, ctypes.byref(text))
        raise DriverError(f"{name}: {(text.value or b'').decode() or f'error {code}'}")


def use_first_gpu() -> None:
    """Make the primary context of the first GPU, which CUDA's runtime shares, the context of this thread.

    Raises:
        DriverError: there is no GPU.
    """
    device, context = ctypes.c_int(0), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(device), 0)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    _call("cuCtxSetCurrent", context)


class DeviceMemory:
    """Bytes on the GPU of the context of this thread, freed with the object.

    Args:
        size: number of bytes.

    Raises:
        DriverError: there is no context, or not enough memory.
    """

    def __init__(self, size: int) -> None:
        pointer = ctypes.c_uint64()
        _call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(1, size)))
        self.address, self._size = pointer.value, size
        weakref.finalize(self, _driver().cuMemFree_v2, ctypes.c_uint64(pointer.value))

    def write(self, content: bytes) -> None:
        """Copy `content` to the GPU."""
        if len(content) > self._size:
            raise DriverError(f"{len(content)} bytes do not fit into {self._size}")
        _call("cuMemcpyHtoD_v2", ctypes.c_uint64(self.address), content, ctypes.c_size_t(len(content)))

    def read(self) -> bytes:
        """Wait for the GPU and return the content."""
        _call("cuCtxSynchronize")
        buffer = ctypes.create_string_buffer(max(1, self._size))
        _call("cuMemcpyDtoH_v2", buffer, ctypes.c_uint64(self.address), ctypes.c_size_t(self._size))
        return buffer.raw[: self._size]


__all__ = ["DeviceMemory", "DriverError", "compute_capability", "gpu_count", "use_first_gpu"]
