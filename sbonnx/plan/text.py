"""Conversion of a plan to and from plain values, for files, diffs and the command line."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sbonnx.errors import RecipeError
from sbonnx.plan.types import ObserverChoice, Plan, Reader, RoundingChoice, Site
from sbonnx.report import Refusal
from sbonnx.spec import QuantSpec, ScaleLimits

FORMAT = 1


def to_dict(plan: Plan) -> dict[str, Any]:
    """Convert a plan to plain values that ``json.dumps`` accepts."""
    return {"format": FORMAT, **asdict(plan)}


def from_dict(values: dict[str, Any]) -> Plan:
    """Rebuild the plan that `to_dict` wrote.

    Raises:
        RecipeError: another format, or a key is missing or unknown.
    """
    if values.get("format") != FORMAT:
        raise RecipeError(
            f"the plan has format {values.get('format')!r}; this version reads format {FORMAT}. Plan again."
        )
    try:
        return Plan(
            sites=tuple(_site(row) for row in values["sites"]),
            refusals=tuple(Refusal(**row) for row in values["refusals"]),
            backend=values["backend"],
            scale_rule=values["scale_rule"],
            weights=values["weights"],
            weights_alone=values["weights_alone"],
            float_type=values["float_type"],
            scales=ScaleLimits(**values["scales"]),
        )
    except (KeyError, TypeError) as error:
        raise RecipeError(f"the plan is damaged ({error}). Plan again.") from error


def _site(row: dict[str, Any]) -> Site:
    return Site(
        **{
            **row,
            "spec": QuantSpec(**row["spec"]),
            "readers": tuple(Reader(**reader) for reader in row["readers"]),
            "observer": ObserverChoice(**row["observer"]),
            "rounding": RoundingChoice(**row["rounding"]),
            "fixed": None if row["fixed"] is None else tuple(row["fixed"]),
            "follows": None if row["follows"] is None else tuple(row["follows"]),
        }
    )
