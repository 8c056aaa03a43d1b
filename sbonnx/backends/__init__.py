"""Runtimes to quantize for. To add one, add a module or package here and an entry in `BACKENDS`."""

from __future__ import annotations

from typing import Final

from sbonnx import plugins
from sbonnx.backends.base import Backend, Files, Numbers
from sbonnx.backends.mode_limits import ModeLimits, SideLimits
from sbonnx.backends.onnxruntime.backend import ONNXRUNTIME
from sbonnx.backends.openvino.backend import OPENVINO
from sbonnx.backends.placement_rules import Placement, Rule
from sbonnx.backends.qnn.backend import QNN
from sbonnx.backends.runtime_types import Entry, ExecutedLayer, Runtime, RuntimeSession
from sbonnx.backends.tensorrt.backend import TENSORRT, of_version
from sbonnx.backends.virtual import VIRTUAL
from sbonnx.backends.web import WEB
from sbonnx.plugins.registry import Registry, instance_of
from sbonnx.schemes import VERSIONS

BACKENDS: Final[Registry[Backend]] = Registry(
    plugins.BACKENDS,
    instance_of(Backend, "sbonnx.backends.Backend"),
    {
        "virtual": VIRTUAL,
        "onnxruntime": ONNXRUNTIME,
        "tensorrt": TENSORRT,
        "openvino": OPENVINO,
        "qnn": QNN,
        "web": WEB,
    },
)
"""Every backend by its recipe name, those of installed packages included."""


def versions_of(name: str) -> tuple[str, ...]:
    """Return the versions of a backend that a recipe may name, newest first; empty if it has none."""
    return VERSIONS if name == TENSORRT.name else ()


def backend_for(name: str, version: str | None = None) -> Backend:
    """Return the backend that a recipe names, for the version that it names."""
    return of_version(str(version)) if version in versions_of(name) else BACKENDS[name]


def full_name(backend: Backend) -> str:
    """Return the name of a backend that a recipe may have: with its version, if that is not the newest."""
    version = backend.files.version
    return backend.name if version in (None, *versions_of(backend.name)[:1]) else f"{backend.name}@{version}"


__all__ = [
    "BACKENDS",
    "Backend",
    "Entry",
    "ExecutedLayer",
    "Files",
    "ModeLimits",
    "Numbers",
    "Placement",
    "Rule",
    "Runtime",
    "RuntimeSession",
    "SideLimits",
    "backend_for",
    "full_name",
    "versions_of",
]
