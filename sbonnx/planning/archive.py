"""Plans from the plain values of `Plan.to_dict`."""

from __future__ import annotations

from typing import Any

from sbonnx.errors import RecipeError
from sbonnx.planning.types import PLAN_FORMAT, Plan
from sbonnx.report.reading import read


def from_dict(values: dict[str, Any]) -> Plan:
    """Rebuild the plan that `Plan.to_dict` wrote.

    Raises:
        RecipeError: another format, a key is missing, or a value does not fit.
    """
    if values.get("format") != PLAN_FORMAT:
        raise RecipeError(
            f"the plan has format {values.get('format')!r}; this version reads format {PLAN_FORMAT}. Plan again."
        )
    try:
        return read(Plan, values)
    except ValueError as error:
        raise RecipeError(f"the plan is damaged ({error}). Plan again.") from error
