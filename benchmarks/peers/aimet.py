"""AIMET-ONNX on one model: `python -m benchmarks.peers.aimet '{"method": ...}'` by its own Python.

Methods: nearest, seqmse, adaround; with "cle+" before one, cross-layer equalization first, its recipe for MobileNets.
``scheme`` is its ``quant_scheme``: min_max, tf_enhanced (SQNR) or percentile, for weights and activations; with
"activations:" before it for activations only, weights by min-max a channel, which its guide prefers for scales a
channel. As its documentation advises: batch norms folded first, calibration of activations last. The result is saved as
an ordinary Q/DQ file.
"""

from __future__ import annotations

from typing import Any, Final

import onnx

from benchmarks.peers import measured

EQUALIZED: Final = "cle+"
ACTIVATIONS: Final = "activations:"


def quantize(job: measured.Job, samples: measured.Feeds) -> None:
    """Quantize the float file and save the Q/DQ file."""
    import aimet_onnx
    from aimet_onnx.batch_norm_fold import fold_all_batch_norms_to_weight
    from aimet_onnx.cross_layer_equalization import equalize_model

    model = onnx.load(job["model"])
    method = job["method"].removeprefix(EQUALIZED)
    if method == job["method"]:
        fold_all_batch_norms_to_weight(model)
    else:
        equalize_model(model)  # folds batch norms too
    sim = simulation(aimet_onnx, model, job, samples)
    if method == "adaround":
        aimet_onnx.apply_adaround(sim, samples, num_iterations=job["iterations"])
    elif method == "seqmse":
        aimet_onnx.apply_seq_mse(sim, samples)
    sim.compute_encodings(samples)
    onnx.save(exported(sim), job["output"])


def simulation(aimet_onnx: Any, model: onnx.ModelProto, job: measured.Job, samples: measured.Feeds) -> Any:
    """Return the model with quantizers of the widths and range schemes of the job."""
    from aimet_onnx.common.defs import QuantScheme

    scheme = job["scheme"].removeprefix(ACTIVATIONS)
    split = scheme != job["scheme"]
    sim = aimet_onnx.QuantizationSimModel(
        model,
        param_type=aimet_onnx.qtype.int(job["w_bit"]),
        activation_type=aimet_onnx.qtype.int(job["a_bit"]),
        quant_scheme="min_max" if split else scheme,
        dummy_input=samples[0],
    )
    for name in sim.activation_names if split else ():
        sim.qc_quantize_op_dict[name].set_quant_scheme(QuantScheme.from_str(scheme))
    return sim


def exported(sim: Any) -> onnx.ModelProto:
    """Export the Q/DQ model."""
    found = sim.to_onnx_qdq(prequantize_constants=True)
    assert isinstance(found, onnx.ModelProto)
    return found


if __name__ == "__main__":
    raise SystemExit(measured.main(quantize, "aimet_onnx"))
