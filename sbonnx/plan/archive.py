"""Conversion of plans to plain values for JSON, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sbonnx.errors import RecipeError
from sbonnx.plan.types import PLAN_FORMAT, GivenParams, ObserverChoice, Plan, Reader, RoundingChoice, Site
from sbonnx.report import Refusal
from sbonnx.report.reading import read
from sbonnx.spec import QuantSpec, ScaleLimits
from sbonnx.values import plain


def to_dict(plan: Plan) -> dict[str, Any]:
    """Convert a plan to plain values that ``json.dumps`` accepts."""
    return dict(plain(plan))


def _given(row: Mapping[str, Any] | None) -> GivenParams | None:
    return None if row is None else GivenParams(tuple(row["scale"]), tuple(row["zero_point"]))


def from_dict(values: dict[str, Any]) -> Plan:
    """Rebuild the plan that `to_dict` wrote.

    Raises:
        RecipeError: another format, or a key is missing or unknown.
    """
    if values.get("format") != PLAN_FORMAT:
        raise RecipeError(
            f"the plan has format {values.get('format')!r}; this version reads format {PLAN_FORMAT}. Plan again."
        )
    try:
        return Plan(
            sites=tuple(
                Site(
                    **{
                        **row,
                        "spec": QuantSpec(**row["spec"]),
                        "readers": tuple(Reader(**reader) for reader in row["readers"]),
                        "observer": ObserverChoice(**row["observer"]),
                        "rounding": RoundingChoice(**row["rounding"]),
                        "fixed": None if row["fixed"] is None else tuple(row["fixed"]),
                        "given": _given(row.get("given")),
                        "follows": None if row["follows"] is None else tuple(row["follows"]),
                    }
                )
                for row in values["sites"]
            ),
            refusals=tuple(read(Refusal, row) for row in values["refusals"]),
            backend=values["backend"],
            scale_rule=values["scale_rule"],
            weights=values["weights"],
            weights_alone=values["weights_alone"],
            float_type=values["float_type"],
            scales=ScaleLimits(**values["scales"]),
            cpu=values.get("cpu", ""),
        )
    except (KeyError, TypeError) as error:
        raise RecipeError(f"the plan is damaged ({error}). Plan again.") from error
