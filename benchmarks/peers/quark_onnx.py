"""AMD Quark on one model: `python -m benchmarks.peers.quark_onnx '{"method": ...}'` by its own Python.

Methods: nearest, adaround, adaquant; 8 bits (it has no 4-bit weights of convolutions), weights a channel by min-max,
activations by ``scheme``: min_max or percentile. The result is the Q/DQ file that it writes.
"""

from __future__ import annotations

from benchmarks.peers import measured


def quantize(job: measured.Job, samples: measured.Feeds) -> None:
    """Quantize the float file and save the quantized one."""
    from onnxruntime.quantization.calibrate import CalibrationDataReader
    from quark.onnx import AdaQuantConfig, AdaRoundConfig, ModelQuantizer, QConfig, QLayerConfig
    from quark.onnx.quantization.config.spec import CalibMethod, Int8Spec, QuantGranularity, UInt8Spec

    learned = {"adaround": AdaRoundConfig, "adaquant": AdaQuantConfig}
    algorithms = []
    if job["method"] in learned:
        algorithms = [learned[job["method"]](num_iterations=job["iterations"], batch_size=job["batch"])]
    methods = {"min_max": CalibMethod.MinMax, "percentile": CalibMethod.Percentile}
    config = QConfig(
        global_config=QLayerConfig(
            activation=UInt8Spec(calibration_method=methods[job["scheme"]]),
            weight=Int8Spec(calibration_method=CalibMethod.MinMax, quant_granularity=QuantGranularity.Channel),
        ),
        algo_config=algorithms,
    )
    reader = type("Samples", (measured.Reader, CalibrationDataReader), {})(samples)
    ModelQuantizer(config).quantize_model(job["model"], job["output"], reader)


if __name__ == "__main__":
    raise SystemExit(measured.main(quantize, "quark.onnx", batch=1))
