"""A backend: an imagined accelerator that runs convolutions, and the additions behind them, in integers.

A backend is three objects: a `Placement` (which weighted operators have integer kernels, rules for the inputs of other
operators), `Numbers` (types and scales) and `Files` (the form that the runtime reads). This one begins with `virtual`,
which can simulate any width, and narrows it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from sbonnx.backends import Backend, Placement, Rule
from sbonnx.backends.virtual import VIRTUAL

RULES: Final = (
    Rule("addition", frozenset({"Add"}), "all", when="input_written", why="an addition behind a convolution"),
)

CONVOLVER: Final[Backend] = replace(
    VIRTUAL,
    name="convolver",
    placement=Placement(linear=frozenset({"Conv"}), rules=RULES, folds=VIRTUAL.placement.folds),
    numbers=replace(VIRTUAL.numbers, joins_concat=True),
)
