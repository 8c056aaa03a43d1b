"""The callback of Ultralytics, in a stand-in with the members of `Exporter` that callbacks see (as of 8.4).

The package needs torchvision and OpenCV, which the tests do without.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest

from sbonnx.assets import digits
from sbonnx.errors import RecipeError
from sbonnx.integrations.ultralytics import Exporter, quantize_on_export
from sbonnx.report import Report

METADATA = {"stride": "32", "task": "classify", "names": "{0: 'zero', 1: 'one'}"}


class StandInExporter:
    """Exports the digits model with metadata, and calls the callbacks of ``on_export_end`` with itself."""

    def __init__(self, folder: Path, form: str, callback: Callable[[Exporter], None]) -> None:
        self.file = folder / "digits.pt"
        self.args = SimpleNamespace(format=form)
        self.callbacks = {"on_export_end": [callback]}

    def __call__(self) -> str:
        path = self.file.with_suffix(".onnx")
        proto = onnx.load(shutil.copy(digits().model, path))
        onnx.helper.set_model_props(proto, METADATA)
        onnx.save(proto, path)
        for callback in self.callbacks["on_export_end"]:
            callback(self)
        return str(path)


def test_an_export_writes_the_quantized_file_beside_the_float_one(tmp_path: Path) -> None:
    reports: list[Report] = []
    callback = quantize_on_export(digits().calib, preprocess=None, on_report=reports.append, effort="fast", samples=64)
    for _ in range(2):  # another export replaces the file
        assert StandInExporter(tmp_path, "onnx", callback)() == str(tmp_path / "digits.onnx")
    proto = onnx.load(tmp_path / "digits.int8.onnx")
    assert any(node.op_type == "QuantizeLinear" for node in proto.graph.node)
    props = {prop.key: prop.value for prop in proto.metadata_props}
    assert METADATA.items() <= props.items()  # Ultralytics reads names and stride of a file from there
    assert [report.output for report in reports] == [str(tmp_path / "digits.int8.onnx")] * 2


def test_other_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="'engine', and only ONNX files"):
        StandInExporter(tmp_path, "engine", quantize_on_export(digits().calib))()


def test_a_file_below_quality_fails_the_export(tmp_path: Path) -> None:
    callback = quantize_on_export(
        digits().calib, preprocess=None, backend="virtual", bits="w2a2", effort="fast", samples=64
    )
    with pytest.raises(ValueError, match=r"digits\.int8\.onnx is below quality"):
        StandInExporter(tmp_path, "onnx", callback)()
    assert (tmp_path / "digits.int8.onnx").exists()
