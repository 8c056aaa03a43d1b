"""A backend: an imagined accelerator that runs convolutions, and the additions behind them, in integers.

A backend is data: which weighted operators have integer kernels (`linear`), rules for the inputs of other operators,
and the types that the runtime takes. This one begins with `virtual`, which can simulate any width, and narrows it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from sbonnx.backends import Backend, Rule
from sbonnx.backends.virtual import VIRTUAL

RULES: Final = (
    Rule("addition", frozenset({"Add"}), "all", when="input_written", why="an addition behind a convolution"),
)

CONVOLVER: Final[Backend] = replace(
    VIRTUAL, name="convolver", linear=frozenset({"Conv"}), rules=RULES, embedding=False, joins_concat=True
)
