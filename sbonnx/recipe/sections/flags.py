"""Options of the command line that set recipe keys."""

from __future__ import annotations

from typing import Final, NamedTuple

QUANTIZATION: Final = "Quantization"
SAMPLING: Final = "Samples"
CALIBRATION: Final = "Calibration"
QUALITY: Final = "Quality"
GOAL: Final = "Goal"
TEXTS: Final = "Text"
"""Help groups."""


class Flag(NamedTuple):
    """Option of the command line that sets a key.

    Attributes:
        usage: flags, then the placeholder of the value if it has one.
        help: help text.
        group: panel of the help on a terminal; "": the first one.
        shown: default in the help.
    """

    usage: str
    help: str
    group: str = ""
    shown: str = ""
