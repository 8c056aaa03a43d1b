"""Choice of the runtime that executes a file, and sessions in it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import onnx

from sbonnx.backends import BACKENDS, Backend, Runtime
from sbonnx.backends.fixed_shapes import opened
from sbonnx.errors import DeviceError, RecipeError
from sbonnx.graph.storage.model_file import open_model
from sbonnx.recipe.names import full_backend
from sbonnx.report.verdict import ON_CPU
from sbonnx.system.cpu import CPUS, RECORDED_CPU
from sbonnx.verify.sessions import session

RECORDED: Final = "sbonnx.backend"
"""Entry of a file's metadata that names its backend, with the version if it is not the newest."""

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
        recorded = (recorded_backend(path).partition("@")[0] for path in files) if device == CPU else ()
        names = (runtime_here(BACKENDS[name])[0] for name in recorded if name in BACKENDS)
        return next((name for name in names if name != ON_CPU), ON_CPU)
    name = full_backend(wanted)
    runtime = BACKENDS[name].runtime if name in BACKENDS else None
    if name != ON_CPU and runtime is None:
        runtimes = [ON_CPU, *(backend for backend in BACKENDS if BACKENDS[backend].runtime is not None)]
        raise RecipeError(f"--runtime '{wanted}' is not known: choose one of {', '.join(runtimes)}")
    why = None if runtime is None else runtime.absent()
    if why is not None:
        raise DeviceError(why)
    if runtime is not None and device != CPU:
        raise RecipeError(f"--device {device} is for onnxruntime, and --runtime is {name}")
    return name


def recorded_backend(path: Path) -> str:
    """Return the backend of a file of ours, as `sbonnx.backends.full_name`; "" if it names none."""
    return metadata_of(path).get(RECORDED, "")


def recorded_cpu(path: Path) -> str:
    """Return the kind of CPU that a file of ours is for; "" if it names none."""
    return metadata_of(path).get(RECORDED_CPU, "")


def metadata_of(model: Path | bytes) -> dict[str, str]:
    """Return the metadata of a file, or of a serialized model."""
    proto = open_model(model).model if isinstance(model, Path) else onnx.load_model_from_string(model)
    return {entry.key: entry.value for entry in proto.metadata_props}


def exact_products(path: Path, cpu: str = "") -> bool | None:
    """Whether a file is for kernels that add 8-bit products exactly: of another runtime, or of a CPU with VNNI.

    Args:
        cpu: kind of CPU that the file is for; "": as its metadata says.

    Returns:
        None if it is not known, as for files of other tools. `sbonnx.verify.session` computes here what they do.
    """
    named = metadata_of(path)
    backend, kind = (
        BACKENDS.get(named.get(RECORDED, "").partition("@")[0]),
        CPUS.get(cpu or named.get(RECORDED_CPU, "")),
    )
    if kind is not None:
        return kind.exact
    return True if backend is not None and not backend.numbers.saturates else None


def open_in(
    name: str | Runtime,
    model: Path | bytes,
    *,
    device: str = CPU,
    threads: int | None = None,
    timed: bool = False,
    cpu: str = "",
) -> Any:
    """Open a model in a runtime.

    Args:
        name: as `chosen_runtime` returns it, or a runtime.
        threads: threads inside operators; None: the default of the runtime.
        timed: with the kernels that this CPU has, also if the file is for others.
        cpu: kind of CPU that a file is for, see `exact_products`.

    Raises:
        ModelError: the runtime rejects the model.
    """
    runtime = BACKENDS[name].runtime if isinstance(name, str) else name
    if runtime is not None:
        return opened(runtime, model, threads)
    exact = exact_products(model, cpu) if isinstance(model, Path) and not timed else None
    return session(model, device=device, threads=threads, exact=exact)


__all__ = [
    "RECORDED",
    "chosen_runtime",
    "exact_products",
    "metadata_of",
    "open_in",
    "recorded_backend",
    "recorded_cpu",
    "runtime_here",
]
