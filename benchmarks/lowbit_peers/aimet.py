"""AIMET-ONNX on one model: `python -m benchmarks.lowbit_peers.aimet '{"method": ...}'` by its own Python.

Methods: nearest (min-max ranges), seqmse, adaround. As its documentation advises: batch norms folded first, scales of
weights by min-max a channel, calibration of activations last. The result is saved as an ordinary Q/DQ file.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import onnx

from benchmarks.lowbit_peers import measured


def quantize(job: measured.Job, samples: measured.Feeds) -> None:
    """From the float file to the quantized one."""
    import aimet_onnx
    from aimet_onnx.batch_norm_fold import fold_all_batch_norms_to_weight

    model = onnx.load(job["model"])
    fold_all_batch_norms_to_weight(model)
    sim = aimet_onnx.QuantizationSimModel(
        model,
        param_type=aimet_onnx.qtype.int(job["w_bit"]),
        activation_type=aimet_onnx.qtype.int(job["a_bit"]),
        quant_scheme="min_max",
        dummy_input=samples[0],
    )
    if job["method"] == "adaround":
        aimet_onnx.apply_adaround(sim, samples, num_iterations=job["iterations"])
    elif job["method"] == "seqmse":
        aimet_onnx.apply_seq_mse(sim, samples)
    sim.compute_encodings(samples)
    onnx.save(exported(sim), job["output"])


def exported(sim: Any) -> onnx.ModelProto:
    """The Q/DQ model."""
    found = sim.to_onnx_qdq(prequantize_constants=True)
    assert isinstance(found, onnx.ModelProto)
    return found


def main() -> int:
    """See the module; what the peer prints goes to stderr."""
    job = measured.job()
    samples = measured.feeds(job)
    with contextlib.redirect_stdout(sys.stderr):
        import aimet_onnx  # noqa: F401  # start-up is not counted

        return measured.tell(lambda: quantize(job, samples))


if __name__ == "__main__":
    raise SystemExit(main())
