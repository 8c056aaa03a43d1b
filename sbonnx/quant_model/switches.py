"""Switches of single quantizers in the simulated forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Literal

from sbonnx.plan import Plan, Site
from sbonnx.plan.types import Role

Side = Literal["input", "weight"]

SIDES: Final[tuple[Side, ...]] = ("input", "weight")
ROLES: Final[dict[Side, Role]] = {"input": "activation", "weight": "weight"}

Switch = tuple[Side, str]
"""(side, node name): the inputs or the weight of one node."""


def is_on(side: Side, node: str, quant: tuple[bool, bool], switches: Mapping[Switch, bool]) -> bool:
    """Return whether a quantizer is applied.

    Args:
        quant: (w_quant, a_quant) of `set_quant`.
        switches: overrides for single quantizers since then.
    """
    return switches.get((side, node), quant[0] if side == "weight" else quant[1])


def switched(plan: Plan, quant: tuple[bool, bool], switches: Mapping[Switch, bool]) -> tuple[Plan, bool, bool]:
    """Return the plan with only the switched-on readers, and whether any weight and any activation is quantized."""
    left: list[Site] = []
    for site in plan.sites:
        side: Side = "weight" if site.role == "weight" else "input"
        readers = tuple(
            reader for reader in site.readers if site.role == "bias" or is_on(side, reader.node, quant, switches)
        )
        if readers:
            left.append(replace(site, readers=readers))
    nodes = {site.key: {reader.node for reader in site.readers} for site in left}

    def product_on(site: Site) -> bool:
        data, weight = (nodes.get(key, set()) for key in site.follows or ())
        return bool(data & weight)

    sites = tuple(site for site in left if site.follows is None or product_on(site))
    roles = {site.role for site in sites}
    return replace(plan, sites=sites), "weight" in roles, "activation" in roles
