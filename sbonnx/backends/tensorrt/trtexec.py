"""The ``trtexec`` command line that builds an engine from a written file, and measures it.

Sources: the documentation of trtexec, and its guide "Migrating trtexec Usage from TensorRT 10.x to 11.x". Version
11 has no precision flags, because all networks are strongly typed; version 10 needs ``--stronglyTyped``, which excludes
them; in older versions, flags enable types.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Sequence
from pathlib import PurePath
from typing import Final

from sbonnx.backends.runtime_types import EngineInput
from sbonnx.backends.tensorrt.profiles import VersionProfile

NEWEST_WEAK: Final = "10"
"""Newest version whose networks can be weakly typed."""

INT8: Final = "int8"
FP8: Final = "fp8"
INT4: Final = "int4"
FP4: Final = "nvfp4"


def engine_command(
    file: str,
    profile: VersionProfile,
    inputs: Iterable[EngineInput] = (),
    *,
    types: Collection[str] = (INT8,),
    strong: bool = False,
) -> str:
    """Return the command line, quoted for a shell.

    Next to the engine, it writes the layers and their times as JSON, which ``sbonnx lint --engine-layers`` reads.

    Args:
        file: path of the ONNX file.
        profile: version of TensorRT.
        inputs: of the network; dynamic dimensions need an optimization profile. The smallest batch is 1; other dynamic
            dimensions have the size of the calibration data.
        types: quantized types in the file: "int8", "fp8", "int4", "nvfp4", which only strongly typed networks have.
        strong: the float part of the file has the types to compute in (HIGH_PRECISION), so TensorRT must keep them.
    """
    stem = str(PurePath(file).with_suffix(""))
    words = ["trtexec", f"--onnx={file}", f"--saveEngine={stem}.engine"]
    if not profile.only_strong:
        if (strong or FP4 in types) and profile.version == NEWEST_WEAK:
            words.append("--stronglyTyped")
        else:
            words += [f"--{name}" for name in (INT8, FP8, INT4) if name in types]
            words.append("--fp16")
    words += _shapes(tuple(inputs))
    words += [f"--exportLayerInfo={stem}.layers.json", f"--exportProfile={stem}.profile.json"]
    words += ["--profilingVerbosity=detailed", "--separateProfileRun"]
    return shlex.join(words)


def _shapes(inputs: Sequence[EngineInput]) -> list[str]:
    """Return the flags of the optimization profile; none if all shapes are static."""
    if all(size is not None for entry in inputs for size in entry.shape):
        return []
    flags = []
    for flag in ("minShapes", "optShapes", "maxShapes"):
        rows = [_shape(entry, least=flag == "minShapes") for entry in inputs if entry.shape]
        flags.append(f"--{flag}={','.join(rows)}")
    return flags


def _shape(one: EngineInput, *, least: bool) -> str:
    """Format the shape of one input: ``image:1x3x224x224``."""
    seen = one.seen if one.seen is not None and len(one.seen) == len(one.shape) else (1,) * len(one.shape)
    sizes = [
        size if size is not None else 1 if least and axis == 0 else seen[axis] for axis, size in enumerate(one.shape)
    ]
    return f"{one.name}:{'x'.join(map(str, sizes))}"
