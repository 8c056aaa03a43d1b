"""onnxruntime's MatMulNBitsQuantizer on one decoder: `python -m benchmarks.peers.onnxruntime_nbits JOB`.

JOB is JSON with model, data, output, bits, block, level (accuracy level; null: its default) and method: asymmetric,
symmetric (rounding to nearest), hqq, rtn, k_quant, gptq, or gptq with the switches "mse" and "actorder", such as
"gptq mse actorder".
"""

from __future__ import annotations

from typing import Any

from benchmarks.peers import measured


def quantize(job: measured.Job, samples: measured.Feeds) -> None:
    """Quantize all MatMul of the float file, and save it with external data."""
    import onnx
    from onnxruntime.quantization import matmul_nbits_quantizer as nbits

    quantizer = nbits.MatMulNBitsQuantizer(
        onnx.load(job["model"]),  # as its command line does
        bits=job["bits"],
        block_size=job["block"],
        is_symmetric=job["method"] == "symmetric",
        accuracy_level=job["level"],
        algo_config=configuration(nbits, job, samples),
    )
    quantizer.process()
    quantizer.model.save_model_to_file(job["output"], True)


def configuration(nbits: Any, job: measured.Job, samples: measured.Feeds) -> Any:
    """Return the configuration of the method; None: rounding to nearest as the quantizer does by default."""
    method, *switches = job["method"].split()
    if method == "hqq":
        return nbits.HQQWeightOnlyQuantConfig(block_size=job["block"], bits=job["bits"])
    if method == "rtn":
        return nbits.RTNWeightOnlyQuantConfig()
    if method == "k_quant":
        return nbits.KQuantWeightOnlyQuantConfig()
    if method == "gptq":
        return nbits.GPTQWeightOnlyQuantConfig(
            measured.Reader(samples), block_size=job["block"], **dict.fromkeys(switches, True)
        )
    return None


if __name__ == "__main__":
    raise SystemExit(measured.main(quantize, "onnxruntime.quantization"))
