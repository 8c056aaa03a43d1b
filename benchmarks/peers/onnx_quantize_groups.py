"""onnx_quantize on one decoder, weights only: `python -m benchmarks.peers.onnx_quantize_groups JOB`.

JOB is JSON with model, output, bits (4 or 8), block and method: asymmetric or symmetric, with the switch "mse". Its
GPTQ is not run: it has one scale for an output, not one for a block, and feeds the first input of the model alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from benchmarks.peers import measured

LATEST: Final = 21
"""Opset that it converts files to."""


def quantize(job: measured.Job, samples: measured.Feeds) -> None:
    """Quantize all MatMul and Gemm of the float file, and save it with external data."""
    import onnx
    import onnx_quantize

    kind, *switches = job["method"].split()
    configuration = onnx_quantize.QConfig(
        is_static=False,
        weights_only=True,
        weights_dtype=onnx_quantize.QuantType.from_string(f"uint{job['bits']}"),
        weights_symmetric=kind == "symmetric",
        group_size=job["block"],
        mse="mse" in switches,
    )
    model = onnx_quantize.quantize(labelled(onnx.load(job["model"])), configuration)
    output = Path(job["output"])
    onnx.save(model, output, save_as_external_data=True, location=f"{output.name}.data")


def labelled(model: Any) -> Any:
    """Label a model of a newer opset as `LATEST`, in place: its version converter does not go back.

    Raises:
        ValueError: an operator of the model is another one in that opset.
    """
    import onnx

    (own,) = (each for each in model.opset_import if not each.domain)
    ops = {node.op_type for node in model.graph.node if not node.domain and onnx.defs.has(node.op_type)}
    changed = [op for op in sorted(ops) if onnx.defs.get_schema(op, own.version).since_version > LATEST]
    if changed:
        raise ValueError(f"opset {own.version} changed {', '.join(changed)}: the model cannot be labelled {LATEST}")
    own.version = min(own.version, LATEST)
    return model


if __name__ == "__main__":
    raise SystemExit(measured.main(quantize, "onnx_quantize"))
