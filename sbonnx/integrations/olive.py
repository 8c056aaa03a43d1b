"""A pass of Olive, and the package configuration that Olive finds it by.

    python -m sbonnx.integrations.olive > packages.json
    olive run --config run.json --package-config packages.json

In run.json, the pass is ``{"type": "SbonnxQuantization", "data_config": ..., "backend": ..., "recipe": {...}}``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from olive.common.config_utils import validate_config
from olive.data.config import DataConfig
from olive.hardware.accelerator import AcceleratorSpec
from olive.model import ONNXModelHandler
from olive.model.utils import resolve_onnx_path
from olive.package_config import OlivePackageConfig
from olive.passes import Pass
from olive.passes.pass_config import BasePassConfig, PassConfigParam

from sbonnx.api import create as api

PASS: Final = "SbonnxQuantization"
REPORT: Final = "sbonnx_report"
"""Model attribute with the figures of the report."""

ENTRY: Final = {
    "module_path": f"{__name__ if __name__ != '__main__' else 'sbonnx.integrations.olive'}.{PASS}",
    "supported_providers": ["*"],
    "supported_accelerators": ["*"],
    "supported_precisions": ["*"],
    "supported_algorithms": [],
    "supported_quantization_encodings": ["qdq"],
    "dataset": "dataset_optional",
}


class SbonnxQuantization(Pass):
    """Quantize an ONNX model with sbonnx, and verify it against the float model.

    The pass fails if the result is unusable or misses a limit of the recipe (MAX_LOSS).
    """

    @classmethod
    def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        return {
            "data_config": PassConfigParam(
                type_=DataConfig | dict | None,
                default_value=None,
                description="Calibration data as a data configuration of Olive.",
            ),
            "data": PassConfigParam(
                type_=str | None,
                default_value=None,
                description="Calibration data as a path that sbonnx reads, instead of data_config.",
            ),
            "backend": PassConfigParam(
                type_=str | None,
                default_value=None,
                description="Runtime: onnxruntime (default), openvino, qnn, tensorrt, virtual.",
            ),
            "recipe": PassConfigParam(
                type_=dict[str, Any] | str | None,
                default_value=None,
                description="Recipe of sbonnx: keys and values, the path of a file, or 'auto'.",
            ),
            "split": PassConfigParam(
                type_=int | None, default_value=None, description="Batch size in which long arrays are cut."
            ),
            "preprocess": PassConfigParam(
                type_=dict[str, Any] | str | None,
                default_value=None,
                description="Preprocessing of images, audio and texts at the path `data`.",
            ),
            "max_loss": PassConfigParam(
                type_=float | str | None, default_value=None, description="Largest loss, such as '0.5%'."
            ),
        }

    def _run_for_config(
        self, model: ONNXModelHandler, config: type[BasePassConfig], output_model_path: str
    ) -> ONNXModelHandler:
        values: Any = config
        source = Path(model.model_path)
        target = Path(resolve_onnx_path(output_model_path, source.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        limit = {} if values.max_loss is None else {"max_loss": values.max_loss}
        report = api.quantize(
            source,
            values.data if values.data_config is None else _Feeds(values.data_config, model),
            backend=values.backend,
            recipe=values.recipe,
            output=target,
            force=True,
            split=values.split,
            preprocess=values.preprocess,
            **limit,
        )
        if not report.ok:
            raise ValueError(f"sbonnx: {'; '.join(report.problems)}")
        attributes = {
            **(model.model_attributes or {}),
            REPORT: json.loads(json.dumps(report.to_dict()["metrics"], default=str)),
        }
        return ONNXModelHandler(model_path=str(target), model_attributes=attributes)


@dataclass(frozen=True)
class _Feeds:
    """Feeds of Olive's calibration data: dicts of arrays, created again for each iteration."""

    config: Any
    model: ONNXModelHandler

    def __iter__(self) -> Iterator[Any]:
        container = validate_config(self.config, DataConfig).to_data_container()
        loader = container.create_calibration_dataloader(
            model_path=self.model.model_path, io_config=self.model.io_config
        )
        yield from loader


def package_config() -> dict[str, Any]:
    """Return the package configuration of the installed Olive with the pass of sbonnx."""
    values: dict[str, Any] = json.loads(Path(OlivePackageConfig.get_default_config_path()).read_text())
    return {**values, "passes": {**values["passes"], PASS: ENTRY}}


if __name__ == "__main__":
    json.dump(package_config(), sys.stdout, indent=2)
    print()
