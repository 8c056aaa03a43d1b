"""onnxsim on one model: `python -m benchmarks.peers.onnxsim_qdq '{"method": ...}'` by its own Python.

Methods: nearest, adaround (its own, on int8 Q/DQ files) and gptq (searched ranges of weights, zero points where below 8
bits). ``scheme`` is its calibration method for activations: minmax, mse, entropy, percentile. The model is simplified
first, which folds batch norms. It has no 4-bit static quantization of convolutions except by GPTQ, which stores the
codes of ``w_bit`` bits in 8-bit tensors and skips grouped convolutions: these keep 8 bits.
"""

from __future__ import annotations

import onnx

from benchmarks.peers import measured


def quantize(job: measured.Job, samples: measured.Feeds) -> None:
    """Quantize the float file and save the Q/DQ file."""
    import onnxsim
    from onnxsim.full_qdq import quantize_full_qdq
    from onnxsim.quark_weight_rounding import adaround_int8, gptq_int8

    simple, same = onnxsim.simplify(onnx.load(job["model"]))
    if not same:
        raise SystemExit("onnxsim.simplify changes the model's outputs")
    model = quantize_full_qdq(simple, samples, method=job["scheme"])
    if job["method"] == "adaround":
        model, _ = adaround_int8(simple, model, samples, num_iterations=job["iterations"])
    elif job["method"] == "gptq":
        model, _ = gptq_int8(
            simple, model, samples, bits=job["w_bit"], per_channel=True, weight_symmetric=job["w_bit"] == 8, mse=True
        )
    onnx.save(model, job["output"])


if __name__ == "__main__":
    raise SystemExit(measured.main(quantize, "onnxsim.quark_weight_rounding"))
