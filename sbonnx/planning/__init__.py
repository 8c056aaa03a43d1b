"""Quantization planning without data: a pure function from graph, recipe and backend to a plan."""

from __future__ import annotations

from sbonnx.ops import BITS
from sbonnx.planning.archive import from_dict
from sbonnx.planning.make import Planner, costs_of, make
from sbonnx.planning.times import plan_times
from sbonnx.planning.types import ObserverChoice, Plan, Reader, Role, Site, Solution

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
]
