"""Choice of the runtime that executes a file, and sessions in it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from sbonnx.backends import BACKENDS, Backend
from sbonnx.errors import DeviceError, RecipeError
from sbonnx.graph import read_proto
from sbonnx.recipe.names import full_backend
from sbonnx.report.verdict import ON_CPU
from sbonnx.verify.sessions import session

RECORDED: Final = "sbonnx.backend"
"""Entry of a file's metadata that names its backend; written if the backend has a runtime."""

CPU: Final = "cpu"


def runtime_here(backend: Backend) -> tuple[str, str]:
    """Return the name of the runtime that executes a backend's files here, and why it is not their own; "" if it is."""
    why = None if backend.runtime is None else backend.runtime.absent()
    return (ON_CPU, why or "") if backend.runtime is None or why is not None else (backend.name, "")


def chosen_runtime(wanted: str | None, files: Iterable[Path], *, device: str = CPU) -> str:
    """Return the name of the runtime that executes files.

    Args:
        wanted: its name; None: that of the first file that records one which is installed, else onnxruntime.
        device: of onnxruntime.

    Raises:
        RecipeError: there is no such runtime, or it does not run on the device.
        DeviceError: it is not installed.
    """
    if wanted is None:
        recorded = (_recorded(path) for path in files) if device == CPU else ()
        found = (runtime_here(BACKENDS[name])[0] for name in recorded if name in BACKENDS)
        return next((name for name in found if name != ON_CPU), ON_CPU)
    name = full_backend(wanted)
    runtime = BACKENDS[name].runtime if name in BACKENDS else None
    if name != ON_CPU and runtime is None:
        known = [ON_CPU, *(backend for backend in BACKENDS if BACKENDS[backend].runtime is not None)]
        raise RecipeError(f"--runtime '{wanted}' is not known: choose one of {', '.join(known)}")
    why = None if runtime is None else runtime.absent()
    if why is not None:
        raise DeviceError(why)
    if runtime is not None and device != CPU:
        raise RecipeError(f"--device {device} is for onnxruntime, and --runtime is {name}")
    return name


def _recorded(path: Path) -> str:
    return next((entry.value for entry in read_proto(path).metadata_props if entry.key == RECORDED), "")


def open_in(name: str, model: Path | bytes, *, device: str = CPU, threads: int | None = None) -> Any:
    """Open a model in a runtime.

    Args:
        name: as `chosen_runtime` returns it.
        threads: threads inside operators; None: the default of the runtime.

    Raises:
        ModelError: the runtime rejects the model.
    """
    runtime = BACKENDS[name].runtime
    return session(model, device=device, threads=threads) if runtime is None else runtime.open(model, threads)


__all__ = ["RECORDED", "chosen_runtime", "open_in", "runtime_here"]
