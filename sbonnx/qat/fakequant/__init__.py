"""Fake-quantization modules for weights and activations in training, one class for each method."""

from __future__ import annotations

import inspect
from typing import Any, Final

from sbonnx.errors import RecipeError
from sbonnx.qat.fakequant.base import FakeQuant, Role, quant_parameters
from sbonnx.qat.fakequant.dorefa import DoReFa
from sbonnx.qat.fakequant.lsq import Lsq
from sbonnx.qat.fakequant.lsq_plus import LsqPlus
from sbonnx.qat.fakequant.pact import Pact
from sbonnx.qat.fakequant.uniform import Uniform
from sbonnx.spec import ANY_SCALE, QParams, QuantSpec, ScaleLimits

METHODS: Final[dict[str, type[FakeQuant]]] = {
    "uniform": Uniform,
    "lsq": Lsq,
    "lsq+": LsqPlus,
    "pact": Pact,
    "dorefa": DoReFa,
}
"""Classes of fake-quant modules by the name of their method in recipes."""

OTHER_NAMES: Final = {"lsq_plus": "lsq+", "lsqplus": "lsq+"}
"""Aliases from the ancestor's documentation."""

COMMON: Final = frozenset({"spec", "qparams", "name", "role", "limits"})
"""Arguments that every method has."""

__all__ = ["METHODS", "FakeQuant", "Role", "make_fake_quant", "quant_parameters"]


def make_fake_quant(
    method: str,
    spec: QuantSpec,
    qparams: QParams,
    *,
    name: str,
    role: Role,
    limits: ScaleLimits = ANY_SCALE,
    **options: Any,
) -> FakeQuant:
    """Create the fake-quant module of `method`, initialized with `qparams`.

    Args:
        method: a key of `METHODS`; case-insensitive.
        spec, qparams, name, role, limits: see `FakeQuant`.
        options: method-specific arguments: ``scale_rule`` (uniform, lsq+, dorefa), ``alpha`` (pact),
            ``magnitude`` (dorefa).

    Raises:
        RecipeError: no such method or option, or the method does not support this tensor.
    """
    key = method.lower()
    key = OTHER_NAMES.get(key, key)
    if key not in METHODS:
        raise RecipeError(f"'{name}' is to be trained with '{method}'; there are: {', '.join(METHODS)}")
    known = [each for each in inspect.signature(METHODS[key]).parameters if each not in COMMON]
    for option in options:
        if option not in known:
            takes = f"takes {', '.join(known)}" if known else "takes no options"
            raise RecipeError(f"'{option}' of '{name}' is no option of {key}, which {takes}")
    return METHODS[key](spec, qparams, name=name, role=role, limits=limits, **options)
