"""TensorRT's calibration cache file: ranges for builds with implicit quantization, without Q/DQ nodes.

    TRT-8601-EntropyCalibration2
    input: 3c010a14
    conv1: 3d0b7086

The first line names TensorRT's version and the algorithm. Every other line holds a tensor as TensorRT's ONNX parser
names it (graph inputs and outputs of nodes, by their names in the ONNX file) and 8 hexadecimal digits: the IEEE float32
of its scale, most significant byte first. A tensor's scale is absmax / 127: int8, symmetric, one range per tensor.
Names may contain spaces and colons (TensorRT writes such names itself); onnxruntime reads a name up to its first colon.

TensorRT up to 10 reads it (`trtexec --int8 --calib=FILE`, `IInt8Calibrator.read_calibration_cache`, onnxruntime's
TensorRT provider with `trt_int8_use_native_calibration_table`). Calibrators are deprecated since 10.1 and removed in
11, where quantization is by Q/DQ alone.

Source: TensorRT 8 samples, sampleINT8, "Calibration file"; the scale is `abs(max_dynamic_range) / 127`.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from sbonnx.errors import NumericError, OutputError
from sbonnx.graph import check_target, write_text
from sbonnx.spec import MIN_SCALE, UNUSED_SCALE, Bounds

VERSION: Final = "TRT-8601-EntropyCalibration2"
"""Default first line. trtexec recalibrates on random data if the algorithm is not EntropyCalibration2."""

_VERSION: Final = re.compile(r"TRT-\d+-\w+")

HIGHEST: Final = 127
"""Highest code of symmetric int8."""


def scale_of(bounds: Bounds) -> float:
    """Compute TensorRT's float32 scale of one range: max(-lo, hi) / 127; 1 for a range that holds only 0.

    Raises:
        NumericError: there is one range per channel, or a bound is not finite.
    """
    lo, hi = np.asarray(bounds.lo, np.float64), np.asarray(bounds.hi, np.float64)
    if lo.ndim or hi.ndim:
        raise NumericError(f"it has {lo.size} ranges, one per channel, and TensorRT's file has one per tensor")
    if not (np.isfinite(lo) and np.isfinite(hi)):
        raise NumericError(f"its range {float(lo)} .. {float(hi)} is not finite")
    widest = max(-float(lo), float(hi), 0.0)
    if widest == 0:
        return UNUSED_SCALE  # TensorRT fails on a scale of 0
    return float(np.float32(max(widest / HIGHEST, MIN_SCALE)))


def write_calibration_cache(
    path: str | os.PathLike[str],
    ranges: Mapping[str, Bounds],
    *,
    version: str = VERSION,
    force: bool = False,
) -> None:
    """Write the file atomically, with tensors in the order of `ranges`.

    Args:
        ranges: by the tensor's name in the model that TensorRT will read, float32 (), in units of the tensor.
            TensorRT does not quantize tensors that have no line here.
        version: the first line: `TRT-<version>-<algorithm>`, 8.6.1 being 8601 and 10.3.0 being 100300. TensorRT
            ignores a file that it considers incompatible: give the version that will read it.
        force: replace an existing file.

    Raises:
        NumericError: see `scale_of`; names the tensor.
        OutputError: there are no ranges, the format cannot hold a name or the version, or see `check_target`.
    """
    target = Path(path)
    if not _VERSION.fullmatch(version):
        raise OutputError(f"'{version}' is not a version of a calibration cache: write it like {VERSION}")
    if not ranges:
        raise OutputError(f"'{target}' would hold no ranges: TensorRT takes an empty calibration cache for none")
    lines = [version]
    for name, bounds in ranges.items():
        if not name or not name.isprintable() or name != name.strip():
            raise OutputError(f"tensor {name!r} cannot be written to a calibration cache: rename it in the model")
        try:
            scale = scale_of(bounds)
        except NumericError as error:
            raise NumericError(f"tensor '{name}' cannot be written to a calibration cache: {error}") from None
        lines.append(f"{name}: {struct.pack('>f', scale).hex()}")
    check_target(target, (), force=force)
    write_text(target, "\n".join(lines) + "\n")


__all__ = ["VERSION", "scale_of", "write_calibration_cache"]
