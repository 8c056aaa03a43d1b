"""Quantization planning without data: a pure function from graph, recipe and backend to a plan."""

from __future__ import annotations

from sbonnx.ops import BITS
from sbonnx.plan.archive import from_dict, to_dict
from sbonnx.plan.make import Planner, costs_of, make
from sbonnx.plan.times import plan_times
from sbonnx.plan.types import ObserverChoice, Plan, Reader, Role, Site, Solution

__all__ = [
    "BITS",
    "ObserverChoice",
    "Plan",
    "Planner",
    "Reader",
    "Role",
    "Site",
    "Solution",
    "costs_of",
    "from_dict",
    "make",
    "plan_times",
    "to_dict",
]
