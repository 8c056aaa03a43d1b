"""Updates a solution with corrected biases and scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sbonnx.calib.qparams.solve import bias_codes, weight_of
from sbonnx.graph import Tensor
from sbonnx.plan.types import Plan, Solution
from sbonnx.report import Refusal
from sbonnx.spec import Array, QParams


def with_corrections(
    plan: Plan,
    tensors: Mapping[str, Tensor],
    solution: Solution,
    constants: Mapping[str, Array],
    qparams: Mapping[str, QParams] | None = None,
) -> Solution:
    """Return `solution` with new constants and new weight scales; biases are requantized to match.

    Args:
        tensors: of all scopes, by name.
        constants: new values by tensor name, in the type and shape of the tensor.
        qparams: by site key; other sites and the codes of weights are unchanged.
    """
    numbers = {**solution.qparams, **(qparams or {})}
    values = {**solution.constants, **constants}
    codes, scales = dict(solution.codes), dict(solution.bias_scales)
    refusals = list(solution.refusals)
    for site in plan.of_role("bias"):
        if site.key not in solution.codes:
            continue
        bias = values.get(site.tensor)
        found = bias_codes(site, weight_of(site, tensors[site.tensor]) if bias is None else bias, numbers)
        if isinstance(found, Refusal):
            refusals.append(found)
            del codes[site.key], scales[site.key]
        else:
            codes[site.key], scales[site.key] = found
    return replace(
        solution, qparams=numbers, codes=codes, bias_scales=scales, constants=values, refusals=tuple(refusals)
    )


__all__ = ["with_corrections"]
