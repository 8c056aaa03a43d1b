"""Options of the command line that set recipe keys."""

from __future__ import annotations

from typing import Final

QUANTIZATION: Final = "Quantization"
SAMPLING: Final = "Samples"
CALIBRATION: Final = "Calibration"
QUALITY: Final = "Quality"
EVALUATION: Final = "Evaluation on labelled data"
GOAL: Final = "Goal"
TEXTS: Final = "Text"
"""Help groups."""


class Flag:
    """Option of the command line that sets a key.

    Attributes:
        usage: flags, then the placeholder of the value if it has one.
        help: help text.
        group: panel of the help on a terminal; "": the first one.
        shown: default in the help.
    """

    def __init__(self, usage: str, help: str, group: str = "", shown: str = "") -> None:
        self.usage, self.help, self.group, self.shown = usage, help, group, shown
