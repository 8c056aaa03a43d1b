"""What is computed element by element."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx

from sbonnx.torchnet.call import Call, Function, Tensor, Unfit


def plain(name: str) -> Function:
    """A function of torch by its name, on as many tensors as the node reads."""

    def function(call: Call, *inputs: Tensor) -> Tensor:
        return getattr(call.torch, name)(*inputs)

    return function


def folded(name: str) -> Function:
    """A function of two tensors on any number of them: Max, Min, Sum."""

    def function(call: Call, *inputs: Tensor) -> Tensor:
        result = inputs[0]
        for other in inputs[1:]:
            result = getattr(call.torch, name)(result, other)
        return result

    return function


def mean(call: Call, *inputs: Tensor) -> Tensor:
    """ONNX Mean of any number of tensors."""
    return folded("add")(call, *inputs) / len(inputs)


def div(call: Call, a: Tensor, b: Tensor) -> Tensor:
    """ONNX Div: integers are cut towards zero."""
    return a / b if a.dtype.is_floating_point else call.torch.div(a, b, rounding_mode="trunc")


def mod(call: Call, a: Tensor, b: Tensor) -> Tensor:
    """ONNX Mod: the sign of the divisor, or of the dividend with fmod."""
    return call.torch.fmod(a, b) if call.integer("fmod", 0) else call.torch.remainder(a, b)


def power(call: Call, a: Tensor, b: Tensor) -> Tensor:
    """ONNX Pow: of the type of the base; a square is a product, which has a gradient everywhere."""
    if b.numel() == 1 and not b.requires_grad and float(b) == 2.0:
        return a * a if b.dim() <= a.dim() else (a * a).reshape([1] * (b.dim() - a.dim()) + list(a.shape))
    return call.torch.pow(a, b).to(a.dtype)


def relu(call: Call, x: Tensor) -> Tensor:
    """ONNX Relu."""
    return call.torch.relu(x)


def clip(call: Call, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    """ONNX Clip, limits as attributes before opset 11."""
    least = call.attributes.get("min") if low is None else low.to(x.device)
    most = call.attributes.get("max") if high is None else high.to(x.device)
    return x if least is None and most is None else call.torch.clamp(x, least, most)


def leaky_relu(call: Call, x: Tensor) -> Tensor:
    """ONNX LeakyRelu."""
    return call.torch.nn.functional.leaky_relu(x, call.number("alpha", 0.01))


def prelu(call: Call, x: Tensor, slope: Tensor) -> Tensor:
    """ONNX PRelu: the slope is broadcast to x."""
    return call.torch.where(x < 0, x * slope, x)


def elu(call: Call, x: Tensor) -> Tensor:
    """ONNX Elu."""
    return call.torch.nn.functional.elu(x, call.number("alpha", 1.0))


def celu(call: Call, x: Tensor) -> Tensor:
    """ONNX Celu."""
    return call.torch.nn.functional.celu(x, call.number("alpha", 1.0))


def selu(call: Call, x: Tensor) -> Tensor:
    """ONNX Selu: gamma (max(0, x) + min(0, alpha (e^x - 1)))."""
    alpha = call.number("alpha", 1.6732631921768188)
    return call.number("gamma", 1.0507010221481323) * call.torch.nn.functional.elu(x, alpha)


def thresholded_relu(call: Call, x: Tensor) -> Tensor:
    """ONNX ThresholdedRelu."""
    return call.torch.where(x > call.number("alpha", 1.0), x, call.torch.zeros_like(x))


def hard_sigmoid(call: Call, x: Tensor) -> Tensor:
    """ONNX HardSigmoid: alpha x + beta between 0 and 1."""
    return call.torch.clamp(call.number("alpha", 0.2) * x + call.number("beta", 0.5), 0.0, 1.0)


def hard_swish(call: Call, x: Tensor) -> Tensor:
    """ONNX HardSwish: x times a hard sigmoid of alpha 1/6 and beta 1/2."""
    return x * call.torch.clamp(x / 6 + 0.5, 0.0, 1.0)


def gelu(call: Call, x: Tensor) -> Tensor:
    """ONNX Gelu."""
    return call.torch.nn.functional.gelu(x, approximate=call.text("approximate", "none"))


def mish(call: Call, x: Tensor) -> Tensor:
    """ONNX Mish."""
    return call.torch.nn.functional.mish(x)


def swish(call: Call, x: Tensor) -> Tensor:
    """ONNX Swish: x sigmoid(alpha x)."""
    return x * call.torch.sigmoid(call.number("alpha", 1.0) * x)


def softplus(call: Call, x: Tensor) -> Tensor:
    """ONNX Softplus: log(1 + e^x)."""
    return call.torch.nn.functional.softplus(x, threshold=math.inf if x.dtype.itemsize > 4 else 20.0)


def softsign(call: Call, x: Tensor) -> Tensor:
    """ONNX Softsign."""
    return call.torch.nn.functional.softsign(x)


def identity(call: Call, x: Tensor, *others: Tensor) -> Tensor:
    """Identity, and Dropout at inference.

    Raises:
        Unfit: of a Dropout that gives its mask or drops.
    """
    if call.outputs > 1 or (len(others) > 1 and others[1] is not None and bool(others[1])):
        raise Unfit(f"{call.op} drops values")
    return x


def cast(call: Call, x: Tensor) -> Tensor:
    """ONNX Cast."""
    return x.to(torch_type(call.torch, call.attributes["to"]))


def cast_like(call: Call, x: Tensor, like: Tensor) -> Tensor:
    """ONNX CastLike."""
    return x.to(like.dtype)


def where(call: Call, condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """ONNX Where."""
    return call.torch.where(condition, a, b)


def torch_type(torch: Any, kind: Any) -> Any:
    """torch's name of a type given as ONNX's number or numpy's type.

    Raises:
        Unfit: torch has none.
    """
    name = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind) if isinstance(kind, int) else kind).name
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise Unfit(f"torch has no type {name}")
    return found
