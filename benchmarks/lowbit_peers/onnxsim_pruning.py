"""onnxsim's pruning: `python -m benchmarks.lowbit_peers.onnxsim_pruning '{"method": ...}'` by its own Python.

Methods: l2, l1 (norm of the weights) and wanda (norm of the weights times norm of the activations), each with
``sparsity``, the share of the channels that are removed from each chain of layers it recognizes. The model is
simplified first, which folds batch norms. It has no correction of the remaining weights.
"""

from __future__ import annotations

import onnx

from benchmarks.lowbit_peers import measured


def prune(job: measured.Job, samples: measured.Feeds) -> None:
    """Prune the float file and save the result."""
    import onnxsim
    from onnxsim.pruning import apply_structured_pruning, apply_structured_wanda_pruning

    simple, same = onnxsim.simplify(onnx.load(job["model"]))
    if not same:
        raise SystemExit("onnxsim.simplify changes the model's outputs")
    if job["method"] == "wanda":
        model = apply_structured_wanda_pruning(simple, samples, sparsity=job["sparsity"])
    else:
        model = apply_structured_pruning(simple, sparsity=job["sparsity"], importance_norm=job["method"])
    onnx.save(model, job["output"])


if __name__ == "__main__":
    raise SystemExit(measured.main(prune, "onnxsim.pruning"))
