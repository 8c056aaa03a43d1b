"""Makes the models and data of this example from those that sbonnx carries.

    python prepare.py

models/digits.onnx is the bundled network. models/digits_probs.onnx gives probabilities besides (a Softmax at the end).
models/digits_moved.onnx is the network with weights that were moved a little, as if it had been trained anew.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from sbonnx import digits

HERE = Path(__file__).parent
SHARE = 0.01
"""How far weights are moved, of their standard deviation."""


def with_probabilities(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with a second output: the softmax of its first."""
    scores = model.graph.output[0].name
    model.graph.node.append(helper.make_node("Softmax", [scores], ["probabilities"], "probabilities", axis=-1))
    output = onnx.ValueInfoProto()
    output.CopyFrom(model.graph.output[0])
    output.name = "probabilities"
    model.graph.output.append(output)
    return model


def moved(model: onnx.ModelProto, seed: int = 0) -> onnx.ModelProto:
    """The model with noise on its weights."""
    rng = np.random.default_rng(seed)
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.dtype == np.float32 and values.ndim > 1:
            noise = rng.normal(size=values.shape).astype(np.float32) * values.std() * np.float32(SHARE)
            tensor.CopyFrom(numpy_helper.from_array(values + noise, tensor.name))
    return model


def main() -> None:
    """Write the models and the data beside this file."""
    given = digits()
    models = HERE / "models"
    models.mkdir(exist_ok=True)
    shutil.copy(given.model, models / "digits.onnx")
    onnx.save(with_probabilities(onnx.load(str(given.model))), str(models / "digits_probs.onnx"))
    onnx.save(moved(onnx.load(str(given.model))), str(models / "digits_moved.onnx"))
    shutil.copy(given.calib, HERE / "calib.npz")


if __name__ == "__main__":
    main()
