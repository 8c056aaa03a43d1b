"""TensorRT's calibration-cache file: the bytes TensorRT writes itself, and what cannot stand in it."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbonnx.backends.tensorrt.calibration_cache import scale_of, write_calibration_cache
from sbonnx.errors import NumericError, OutputError
from sbonnx.spec import Bounds

SAMPLE = """TRT-7000-EntropyCalibration2
data: 3c008912
conv1: 3c88edfc
pool1: 3c88edfc
conv2: 3ddc858b
pool2: 3ddc858b
ip1: 3db6bd6e
ip2: 3e691968
prob: 3c010a14
"""
"""As printed in the readme of TensorRT's sampleINT8 (MNIST)."""


def of(lo: float, hi: float) -> Bounds:
    return Bounds(np.float32(lo), np.float32(hi))


def onnxruntime_reads(text: str) -> dict[str, float]:
    """Dynamic ranges as onnxruntime's TensorRT provider takes them from such a file.

    By its description of the format: the name ends at the first colon, the scale is a float32 given by sign,
    exponent and mantissa, and the range is 127 times the scale.
    """
    ranges = {}
    for line in text.splitlines()[1:]:
        name, digits = line.split(":")[:2]
        bits = int(digits, 16)
        sign, exponent, mantissa = bits >> 31, (bits >> 23 & 0xFF) - 127, bits & 0x7FFFFF
        ranges[name] = (-1) ** sign * 2.0**exponent * (1 + mantissa / 2**23) * 127
    return ranges


def test_the_file_of_tensorrts_sample_is_made_of_its_ranges(tmp_path: Path) -> None:
    """Ranges that give the documented scales give the documented file, byte for byte."""
    scales = {line.split(": ")[0]: int(line.split(": ")[1], 16) for line in SAMPLE.splitlines()[1:]}
    values = {name: struct.unpack("<f", struct.pack("<I", bits))[0] for name, bits in scales.items()}
    path = tmp_path / "mnist.cache"
    ranges = {name: Bounds(np.float64(-scale * 127), np.float64(0)) for name, scale in values.items()}
    write_calibration_cache(path, ranges, version="TRT-7000-EntropyCalibration2")
    assert path.read_text() == SAMPLE
    assert values["prob"] * 127 == pytest.approx(1.0, abs=1e-3), (
        "a softmax reaches 1, a bin of a histogram more or less"
    )


def test_onnxruntime_finds_the_ranges(tmp_path: Path) -> None:
    path = tmp_path / "m.cache"
    write_calibration_cache(path, {"x": of(-0.5, 2.0), "conv/out": of(-3.25, 1.0), "low": of(1.0, 4.0)})
    assert onnxruntime_reads(path.read_text()) == pytest.approx({"x": 2.0, "conv/out": 3.25, "low": 4.0}, rel=1e-6)


NAMES = st.text(st.characters(exclude_categories=("C", "Z"), exclude_characters="\n"), min_size=1, max_size=20)
LIMITS = st.floats(-(2.0**100), 2.0**100, width=32)


@pytest.mark.slow
@given(st.dictionaries(NAMES, st.tuples(LIMITS, LIMITS), min_size=1, max_size=5))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, ranges: dict[str, tuple[float, float]]
) -> None:
    path = tmp_path_factory.mktemp("trt") / "m.cache"
    bounds = {name: of(min(pair), max(pair)) for name, pair in ranges.items()}
    write_calibration_cache(path, bounds)
    pairs = [line.rsplit(": ", 1) for line in path.read_text().splitlines()[1:]]
    assert [name for name, _ in pairs] == list(bounds)
    for name, digits in pairs:
        (found,) = struct.unpack(">f", bytes.fromhex(digits))
        assert found == np.float32(scale_of(bounds[name]))
        absmax = max(abs(bound) for bound in ranges[name])
        assert absmax == 0 or found == np.float32(absmax / 127) or absmax / 127 < 2.0**-126


def test_a_tensor_of_zeros_gets_a_scale_that_does_not_stop_tensorrt() -> None:
    assert scale_of(of(0, 0)) == 1.0
    assert scale_of(of(0, 1e-44)) == 2.0**-126


@pytest.mark.parametrize(
    ("bounds", "why"),
    [
        (Bounds(np.zeros(3, np.float32), np.ones(3, np.float32)), "3 ranges, one per channel"),
        (of(-1, np.nan), "-1.0 .. nan is not finite"),
        (of(-np.inf, 1), "-inf .. 1.0 is not finite"),
    ],
)
def test_ranges_it_cannot_hold(bounds: Bounds, why: str, tmp_path: Path) -> None:
    with pytest.raises(NumericError, match=rf"tensor 'conv1' cannot be written .*{why}"):
        write_calibration_cache(tmp_path / "m.cache", {"fine": of(0, 1), "conv1": bounds})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["", " a", "a ", "a\nb", "a\tb", "a\rb", "a\u2028b", "a\x85b"])
def test_names_it_cannot_hold(name: str, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written to a calibration cache: rename it in the model"):
        write_calibration_cache(tmp_path / "m.cache", {name: of(0, 1)})


@pytest.mark.parametrize("version", ["", "8601", "TRT-8.6.1-EntropyCalibration2", "TRT-8601-Entropy\nCalibration"])
def test_versions_that_are_none(version: str, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="write it like TRT-8601-EntropyCalibration2"):
        write_calibration_cache(tmp_path / "m.cache", {"a": of(0, 1)}, version=version)


def test_a_file_that_is_there_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "m.cache"
    path.write_text("mine")
    with pytest.raises(OutputError, match="exists: give --force"):
        write_calibration_cache(path, {"a": of(0, 1)})
    with pytest.raises(OutputError, match="would hold no ranges"):
        write_calibration_cache(path, {}, force=True)
    assert path.read_text() == "mine"
    write_calibration_cache(path, {"a": of(0, 127)}, force=True)
    assert path.read_text() == "TRT-8601-EntropyCalibration2\na: 3f800000\n"
    assert [one.name for one in tmp_path.iterdir()] == ["m.cache"]
