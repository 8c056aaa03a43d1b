"""Quantizes what Ultralytics exports: a callback of ``on_export_end``, beside the float file.

    model = YOLO("yolo11n.pt")
    model.add_callback("on_export_end", quantize_on_export("images/"))
    model.export(format="onnx")  # writes yolo11n.onnx and yolo11n.int8.onnx

Ultralytics itself is not needed to import this module.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sbonnx.api import create as api
from sbonnx.errors import RecipeError

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from sbonnx.calib.data import Preprocessing
    from sbonnx.recipe.keywords import QuantizeKeywords
    from sbonnx.report import Report


class Exporter(Protocol):
    """Members that are read of an exporter of Ultralytics: `file`, the path of the weights, and `args.format`."""

    file: Path
    args: Any


def quantize_on_export(
    data: Any,
    *,
    output: str | os.PathLike[str] | None = None,
    preprocess: Preprocessing | None = "yolo",
    on_report: Callable[[Report], object] | None = None,
    **keywords: Unpack[QuantizeKeywords],
) -> Callable[[Exporter], None]:
    """Return a callback that quantizes the exported file and verifies the result.

    Args:
        data: calibration data as `sbonnx.quantize` takes it, such as a folder of images.
        output: file to write, replaced if it exists; None: the exported file with ``.int8.onnx`` as suffix.
        preprocess: as in `sbonnx.quantize`; "yolo" resizes as detectors do. Data that is no image needs None.
        on_report: called with the report, such as `list.append` or `mlflow.log_report`.
        keywords: as in `sbonnx.quantize`: ``backend="tensorrt"``, ``max_loss="1%"``, ``exclude="head"``.

    Raises:
        RecipeError: by the callback: the export has another format than ``onnx``.
        ValueError: by the callback: the file was written and is below quality.
    """

    def quantize(exporter: Exporter) -> None:
        if exporter.args.format.lower() != "onnx":
            raise RecipeError(
                f"the export has the format '{exporter.args.format}', and only ONNX files can be quantized: "
                'model.export(format="onnx"), and deploy from there'
            )
        model = exporter.file.with_suffix(".onnx")
        target = model.with_suffix(".int8.onnx") if output is None else Path(output)
        report = api.quantize(model, data, output=target, force=True, preprocess=preprocess, **keywords)
        if on_report is not None:
            on_report(report)
        if not report.ok:
            raise ValueError(f"{target} is below quality: {'; '.join(report.problems)}")

    return quantize
