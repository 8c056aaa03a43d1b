"""NVIDIA ModelOpt's ONNX PTQ on one model: `python -m benchmarks.peers.modelopt_onnx '{"method": ...}'`.

Methods: entropy (its default) and max. int8 for TensorRT, the rest in float32 or as the job says. It writes to the
folder of its input, so that it gets a copy of the file. The result is the Q/DQ file that it writes.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from benchmarks.peers import measured


def quantize(job: measured.Job, samples: measured.Feeds) -> None:
    """Quantize the float file and save the Q/DQ file."""
    from modelopt.onnx.quantization import quantize as modelopt_quantize

    with tempfile.TemporaryDirectory() as folder:
        model = shutil.copy(job["model"], Path(folder) / "model.onnx")
        modelopt_quantize(
            str(model),
            quantize_mode="int8",
            calibration_data_reader=measured.Reader(samples),
            calibration_method=job["method"],
            calibration_eps=["cpu"],
            high_precision_dtype=job.get("high_precision", "fp32"),
            output_path=job["output"],
        )


if __name__ == "__main__":
    raise SystemExit(measured.main(quantize, "modelopt.onnx.quantization"))
