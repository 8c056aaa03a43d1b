"""Gradients of reimported nodes against differences, in double precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch")

from sbonnx import graph as graphs  # noqa: E402
from sbonnx.torchnet.onnx_to_torch.reimport import reimport  # noqa: E402
from tests.torchnet.test_functions import CASES, OTHERS, feeds_of, model_of  # noqa: E402

SMOOTH = (
    *("Conv", "ConvTranspose", "Gemm", "MatMul", "MaxPool", "AveragePool", "GlobalAveragePool", "LpPool", "Einsum"),
    *("Add", "Mul", "Div", "Pow", "Max", "PRelu", "Where", "Clip", "Relu", "LeakyRelu", "Elu", "HardSigmoid"),
    *("HardSwish", "Gelu", "Mish", "Softplus", "Erf", "Sigmoid", "Tanh", "Sqrt", "Reciprocal"),
    *("ReduceMean", "ReduceL2", "ReduceProd", "ReduceMax", "Softmax", "LogSoftmax", "LRN"),
    *("LayerNormalization", "InstanceNormalization", "GroupNormalization", "RMSNormalization", "LpNormalization"),
    *("Attention", "RotaryEmbedding", "LSTM", "GRU", "RNN", "Resize", "GridSample", "RoiAlign"),
    *("Slice", "Gather", "GatherND", "ScatterND", "ScatterElements", "Pad", "Concat", "Split", "Trilu", "CumSum"),
    *("DeformConv", "MaxUnpool", "DFT", "STFT", "SplitToSequence", "ConcatFromSequence"),
)
"""Ops whose gradients training relies on."""


def models_of(op: str) -> list[onnx.ModelProto]:
    if op in OTHERS:
        opset, cases = OTHERS[op]
        return [model_of(opset, inputs, call, tuple(values)) for inputs, call, *values in cases]
    opset = {"Gelu": 20, "HardSwish": 17, "Mish": 18}.get(op, 17)
    return [model_of(opset, inputs, f"y = {call}", tuple(values)) for inputs, call, *values in CASES[op]]


@pytest.mark.parametrize("op", SMOOTH)
def test_gradients(op: str) -> None:
    for model in models_of(op):
        module = reimport(graphs.load(model, opset=model.opset_import[0].version)).double().eval()
        feeds = [torch.from_numpy(np.array(value)) for value in feeds_of(model).values()]
        feeds = [x.double().requires_grad_() if x.is_floating_point() else x for x in feeds]

        def outputs(*given: Any, module: Any = module) -> Any:
            return tuple(value for value in module(*given).values() if value.is_floating_point())

        assert torch.autograd.gradcheck(outputs, feeds, fast_mode=True, eps=1e-6, atol=1e-4)


def test_a_batch_norm_in_train_mode() -> None:
    inputs, call = (
        "float[3,4,2,2] x, float[4] s, float[4] b, float[4] m, float[4] p",
        "y = BatchNormalization (x, s, b, m, p)",
    )
    model = model_of(17, inputs, call, ())
    module = reimport(graphs.load(model, opset=17)).double().train()
    x, scale, bias, mean, variance = (torch.from_numpy(value).double() for value in feeds_of(model).values())
    given = [one.requires_grad_() for one in (x, scale, bias)]
    assert torch.autograd.gradcheck(lambda *some: module(*some, mean, variance)["y"], given)
    assert not torch.allclose(
        module(x, scale, bias, mean, variance)["y"], module.eval()(x, scale, bias, mean, variance)["y"]
    )
