"""onnxsim's pruning: `python -m benchmarks.peers.onnxsim_pruning '{"method": ...}'` by its own Python.

Methods for channels: l2, l1 (norm of the weights) and wanda (norm of the weights times norm of the activations), each
with ``sparsity``, the share of the channels that are removed from each chain of layers it recognizes. Methods for
single weights (``unstructured`` is set): magnitude, wanda and sparsegpt, with ``sparsity``, or ``n`` and ``m`` for an
N:M pattern; layers that read an input of the model are left dense. The model is simplified first, which folds batch
norms. No method for channels corrects the remaining weights.
"""

from __future__ import annotations

from typing import Any

import onnx

from benchmarks.peers import measured


def prune(job: measured.Job, samples: measured.Feeds) -> None:
    """Prune the float file and save the result."""
    import onnxsim

    simple, same = onnxsim.simplify(onnx.load(job["model"]))
    if not same:
        raise SystemExit("onnxsim.simplify changes the model's outputs")
    model = _sparse(simple, job, samples) if job.get("unstructured") else _smaller(simple, job, samples)
    onnx.save(model, job["output"])


def _smaller(model: onnx.ModelProto, job: measured.Job, samples: measured.Feeds) -> Any:
    """Remove channels."""
    from onnxsim.pruning import apply_structured_pruning, apply_structured_wanda_pruning

    if job["method"] == "wanda":
        return apply_structured_wanda_pruning(model, samples, sparsity=job["sparsity"])
    return apply_structured_pruning(model, sparsity=job["sparsity"], importance_norm=job["method"])


def _sparse(model: onnx.ModelProto, job: measured.Job, samples: measured.Feeds) -> Any:
    """Set weights to zero, except those of layers that read an input of the model."""
    from onnxsim.pruning import apply_magnitude_pruning, apply_sparsegpt_pruning, apply_wanda_pruning

    wanted = {"sparsity": job["sparsity"], "n": job.get("n"), "m": job.get("m")}
    if job["method"] == "magnitude":
        sparse = apply_magnitude_pruning(model, **wanted)
    else:
        method = {"wanda": apply_wanda_pruning, "sparsegpt": apply_sparsegpt_pruning}[job["method"]]
        sparse = method(model, samples, **wanted)
    inputs = {value.name for value in model.graph.input}
    first = {name for node in model.graph.node if inputs & set(node.input) for name in node.input}
    dense = {tensor.name: tensor for tensor in model.graph.initializer if tensor.name in first}
    for tensor in sparse.graph.initializer:
        if tensor.name in dense:
            tensor.CopyFrom(dense[tensor.name])
    return sparse


if __name__ == "__main__":
    raise SystemExit(measured.main(prune, "onnxsim.pruning"))
