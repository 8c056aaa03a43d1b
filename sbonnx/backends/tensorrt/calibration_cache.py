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

from sbonnx.errors import DataError, NumericError, OutputError
from sbonnx.graph import check_target, write_text
from sbonnx.input_files import read_regular
from sbonnx.spec import MIN_SCALE, UNUSED_SCALE, Array, Bounds

VERSION: Final = "TRT-8601-EntropyCalibration2"
"""Default first line. trtexec recalibrates on random data if the algorithm is not EntropyCalibration2."""

_VERSION: Final = re.compile(r"TRT-\d+-\w+")
_LINE: Final = re.compile(r"(?P<name>.+): ?(?P<bits>[0-9a-fA-F]{1,8})")

LARGEST: Final = 64 << 20
"""Size limit in bytes of a file to read; each line holds one tensor."""

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


def read_calibration_cache(path: str | os.PathLike[str]) -> tuple[str, dict[str, Array]]:
    """Read the first line, and each tensor's scale by name (float32, ()), in the order of the file.

    Raises:
        DataError: the file cannot be read or is not a calibration cache; names the line.
    """
    try:
        lines = read_regular(path, LARGEST).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise DataError(f"'{path}' cannot be read: {reason}") from error
    if not lines or not _VERSION.fullmatch(lines[0].strip()):
        raise DataError(f"'{path}' is not a TensorRT calibration cache: its first line must be like {VERSION}")
    scales: dict[str, Array] = {}
    for number, line in enumerate(lines[1:], 2):
        if not line.strip():
            continue
        found = _LINE.fullmatch(line.strip())
        if not found:
            raise DataError(f"line {number} of '{path}' is not 'tensor: hexadecimal scale': {line[:60]!r}")
        # TensorRT omits leading zeros
        scales[found["name"]] = np.array(struct.unpack(">f", bytes.fromhex(found["bits"].zfill(8)))[0], np.float32)
    return lines[0].strip(), scales


__all__ = ["VERSION", "read_calibration_cache", "scale_of", "write_calibration_cache"]
