"""The model and data that sbonnx carries, for the demo, the tests and the examples of the documentation; a skill.

``examples/digits/train.py`` makes them: a small convolutional network on scikit-learn's 1,797
handwritten digits.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DigitsPaths:
    """Paths of the bundled digits model and its data.

    Attributes:
        model: float ONNX; input ``image`` (N, 1, 8, 8) float32 in [0, 1], output ``scores`` (N, 10).
        calib: npz, ``image`` (256, 1, 8, 8): images the network was trained on.
        eval: npz, ``image`` (450, 1, 8, 8) and ``label`` (450,) int64: images it has not seen.
    """

    model: Path
    calib: Path
    eval: Path


def digits() -> DigitsPaths:
    """The digits model with its calibration and evaluation data."""
    folder = Path(__file__).parent
    return DigitsPaths(folder / "digits.onnx", folder / "digits_calib.npz", folder / "digits_eval.npz")


def skill() -> Path:
    """Folder of an agent skill: SKILL.md with instructions, and scripts over the JSON outputs; copy it as a whole."""
    return Path(__file__).parent / "skills" / "sbonnx"
