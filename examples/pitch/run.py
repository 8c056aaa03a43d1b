"""Quantize SwiftF0, a network that finds the pitch of a voice, and measure how many frames it finds.

    python -m examples.pitch.run out/

Needs the package that has the model: ``pip install --no-deps swift-f0==0.3.0``.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from examples.commands import Figures, command, evaluated, main, size
from examples.packaged import required


def run() -> Figures:
    """Run all steps in the current folder."""
    shutil.copy(required("pitch"), "pitch.onnx")
    shutil.copy(Path(__file__).with_name("tones.py"), ".")
    command("sbonnx quantize pitch.onnx --data tones.py:calibration -o int8.onnx")
    figures = evaluated("sbonnx eval pitch.onnx int8.onnx --data tones.py:evaluation --metric tones.py:near")
    return figures | {"size of int8 / float": size("int8.onnx") / size("pitch.onnx")}


if __name__ == "__main__":
    main(run, __doc__)
