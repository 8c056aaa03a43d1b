"""onnxruntime's quantize_static on one model: `python -m benchmarks.peers.onnxruntime_static '{"method": ...}'`.

Methods: MinMax, Entropy, Percentile. ``scheme``: types of activations and weights, and the granularity of weights, such
as "u8s8 channel" or "s8s8 tensor"; "tensorrt" stands for its documented switches for TensorRT. As its documentation
advises, `quant_pre_process` comes first; where its symbolic shape inference fails, without that step.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Final

from benchmarks.peers import measured

TENSORRT: Final = "tensorrt"


def quantize(job: measured.Job, samples: measured.Feeds) -> None:
    """Quantize the float file and save the Q/DQ file."""
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    _limit_threads(job.get("threads"))
    types, granularity = ("s8s8", "channel") if job["scheme"] == TENSORRT else job["scheme"].split()
    kinds = {"u8": QuantType.QUInt8, "s8": QuantType.QInt8}
    with tempfile.TemporaryDirectory() as folder:
        prepared = str(Path(folder) / "prepared.onnx")
        try:
            quant_pre_process(job["model"], prepared)
        except Exception as error:  # whatever its shape inference raises
            print(f"without symbolic shape inference: {error}")
            quant_pre_process(job["model"], prepared, skip_symbolic_shape=True)
        quantize_static(
            prepared,
            job["output"],
            measured.Reader(samples),
            quant_format=QuantFormat.QDQ,
            per_channel=granularity == "channel",
            activation_type=kinds[types[:2]],
            weight_type=kinds[types[2:]],
            calibrate_method=CalibrationMethod[job["method"]],
            extra_options=switches(job["scheme"]),
        )


def _limit_threads(threads: int | None) -> None:
    """Let the sessions of onnxruntime's quantizer have so many threads, for which it has no option; None: its default.

    Its threads ignore the affinity of the process, and spin while they wait.
    """
    if threads is None:
        return
    import onnxruntime

    class Options(onnxruntime.SessionOptions):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.intra_op_num_threads = threads

    onnxruntime.SessionOptions = Options


def switches(scheme: str) -> dict[str, Any]:
    """Return the extra options of a scheme."""
    if scheme != TENSORRT:
        return {}
    names = {"ActivationSymmetric": True, "WeightSymmetric": True, "QuantizeBias": False, "AddQDQPairToWeight": True}
    return dict(names)


if __name__ == "__main__":
    raise SystemExit(measured.main(quantize, "onnxruntime.quantization"))
