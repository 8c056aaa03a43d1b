"""Element-wise ops."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from sbonnx.torchnet.call import Call, Function, Tensor, Unfit, number


def plain(name: str) -> Function:
    """Return the function of an op that calls a torch function by name on all inputs."""

    def function(call: Call, *inputs: Tensor) -> Tensor:
        return getattr(call.torch, name)(*inputs)

    return function


def folded(name: str) -> Function:
    """Return the function of an op that folds a binary torch function over its inputs: Max, Min, Sum."""

    def function(call: Call, *inputs: Tensor) -> Tensor:
        result = inputs[0]
        for other in inputs[1:]:
            result = getattr(call.torch, name)(result, other)
        return result

    return function


def activation(name: str, alpha: float | None = None) -> Function:
    """Return the function of an op in torch.nn.functional; `alpha` is the default of its attribute, if it has one."""

    def function(call: Call, x: Tensor) -> Tensor:
        options = () if alpha is None else (call.number("alpha", alpha),)
        return getattr(call.torch.nn.functional, name)(x, *options)

    return function


def div(call: Call, a: Tensor, b: Tensor) -> Tensor:
    """ONNX Div: integer division rounds towards zero."""
    return a / b if a.dtype.is_floating_point else call.torch.div(a, b, rounding_mode="trunc")


def mod(call: Call, a: Tensor, b: Tensor) -> Tensor:
    """ONNX Mod: the result has the sign of the divisor, or of the dividend if fmod is set."""
    return call.torch.fmod(a, b) if call.integer("fmod", 0) else call.torch.remainder(a, b)


def power(call: Call, a: Tensor, b: Tensor) -> Tensor:
    """ONNX Pow, in the type of the base. Exponent 2 is computed as a product, whose gradient is defined everywhere."""
    if not hasattr(b, "dim"):
        return a * a if number(b) == 2.0 else call.torch.pow(a, number(b)).to(a.dtype)
    if b.numel() == 1 and not b.requires_grad and float(b) == 2.0:
        return a * a if b.dim() <= a.dim() else (a * a).reshape([1] * (b.dim() - a.dim()) + list(a.shape))
    return call.torch.pow(a, b).to(a.dtype)


def clip(call: Call, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    """ONNX Clip, with limits as attributes before opset 11."""
    least = call.attributes.get("min") if low is None else low
    most = call.attributes.get("max") if high is None else high
    for limit, clamp in ((least, call.torch.clamp_min), (most, call.torch.clamp_max)):
        if limit is not None:
            x = clamp(x, limit.to(x.device) if hasattr(limit, "device") else limit)
    return x


def selu(call: Call, x: Tensor) -> Tensor:
    """ONNX Selu: gamma (max(0, x) + min(0, alpha (e^x - 1)))."""
    alpha = call.number("alpha", 1.6732631921768188)
    return call.number("gamma", 1.0507010221481323) * call.torch.nn.functional.elu(x, alpha)


def softplus(call: Call, x: Tensor) -> Tensor:
    """ONNX Softplus: log(1 + e^x)."""
    return call.torch.nn.functional.softplus(x, threshold=math.inf if x.dtype.itemsize > 4 else 20.0)


def identity(call: Call, x: Tensor, *others: Tensor) -> Any:
    """ONNX Identity, and Dropout at inference, with a mask of all true.

    Raises:
        Unfit: a Dropout in training mode.
    """
    if len(others) > 1 and others[1] is not None and bool(number(others[1])):
        raise Unfit(f"{call.op} is in training mode")
    return (x, call.torch.ones_like(x, dtype=call.torch.bool)) if call.outputs > 1 else x


def shrink(call: Call, x: Tensor) -> Tensor:
    """ONNX Shrink: 0 if |x| <= lambd, else x moved towards 0 by the bias."""
    torch, limit, bias = call.torch, call.number("lambd", 0.5), call.number("bias", 0.0)
    outside = torch.where(x > limit, x - bias, torch.zeros_like(x))
    return torch.where(x < -limit, x + bias, outside).to(x.dtype)


def is_inf(call: Call, x: Tensor) -> Tensor:
    """ONNX IsInf, for both signs or one."""
    infinite = call.torch.isinf(x)
    if not call.integer("detect_negative", 1):
        infinite = infinite & (x > 0)
    return infinite if call.integer("detect_positive", 1) else infinite & (x < 0)


def bit_shift(call: Call, x: Tensor, count: Tensor) -> Tensor:
    left = call.text("direction", "LEFT") == "LEFT"
    return call.torch.bitwise_left_shift(x, count) if left else call.torch.bitwise_right_shift(x, count)


def torch_type(torch: Any, kind: Any) -> Any:
    """Return the torch dtype of an ONNX type number or a numpy dtype.

    Raises:
        Unfit: torch does not have the type.
    """
    name = TYPES.get(int(kind), f"number {kind} of ONNX") if isinstance(kind, int) else np.dtype(kind).name
    torch_dtype = getattr(torch, name, None)
    if not isinstance(torch_dtype, torch.dtype):
        raise Unfit(f"torch has no type {name}")
    return torch_dtype


TYPES: Final = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 9: "bool", 10: "float16",
    11: "float64", 12: "uint32", 13: "uint64", 14: "complex64", 15: "complex128", 16: "bfloat16",
    17: "float8_e4m3fn", 18: "float8_e4m3fnuz", 19: "float8_e5m2", 20: "float8_e5m2fnuz",
}  # fmt: skip
"""Names of torch dtypes by ONNX type number. A table, because torch.compile cannot trace functions of onnx."""
