"""The pass of Olive, in a run of Olive."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from sbonnx.assets import digits

DATA = """
import numpy as np
from olive.data.registry import Registry


class Digits:
    images = np.load(PATH)[NAME][:64]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, place):
        return {NAME: self.images[place]}, 0


@Registry.register_dataset()
def digits_calib(data_dir=None, **others):
    return Digits()
"""

RUN = """
import sys
from olive.workflows import run
run("run.json", package_config="packages.json")
"""


@pytest.mark.slow
def test_a_run_of_olive(tmp_path: Path) -> None:
    pytest.importorskip("olive", reason="olive-ai is not installed")
    files = digits()
    name = onnx.load(files.model).graph.input[0].name
    (tmp_path / "data.py").write_text(f"NAME = {name!r}\nPATH = {str(files.calib)!r}\n{DATA}")
    calib = {
        "name": "calib",
        "user_script": "data.py",
        "load_dataset_config": {"type": "digits_calib"},
        "pre_process_data_config": {"type": "skip_pre_process"},
        "post_process_data_config": {"type": "skip_post_process"},
        "dataloader_config": {"batch_size": 16},
    }
    config = {
        "input_model": {"type": "ONNXModel", "model_path": str(files.model)},
        "data_configs": [calib],
        "passes": {"q": {"type": "SbonnxQuantization", "data_config": "calib", "recipe": {"EFFORT": "fast"}}},
        "evaluate_input_model": False,
        "output_dir": "out",
        "cache_dir": "cache",
    }
    (tmp_path / "run.json").write_text(json.dumps(config))
    for command, target in ((["-m", "sbonnx.integrations.olive"], "packages.json"), (["-c", RUN], "log.txt")):
        with (tmp_path / target).open("w") as file:
            done = subprocess.run(
                [sys.executable, *command],
                cwd=tmp_path,
                stdout=file,
                stderr=subprocess.PIPE,
                text=True,
                timeout=600,
                check=False,
            )
        assert done.returncode == 0, done.stderr
    written = onnx.load(tmp_path / "out" / "model.onnx")
    assert "QuantizeLinear" in {node.op_type for node in written.graph.node}
    attributes = json.loads((tmp_path / "out" / "model_config.json").read_text())["config"]["model_attributes"]
    (output,) = attributes["sbonnx_report"]["outputs"]
    assert output["sqnr_db"] > 30
