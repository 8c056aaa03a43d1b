"""Quantize the bundled digits network for the HTP of Snapdragon phones, and prove it in Qualcomm's emulator.

    python -m examples.phone.run out/

Needs ``pip install onnxruntime onnxruntime-qnn``, here or in the environment that ``SBONNX_QNN_PYTHON`` names.
"""

from __future__ import annotations

import shutil

from examples.commands import Figures, checked, command, main, size
from sbonnx import digits


def prepare() -> None:
    """Copy digits.onnx, digits_calib.npz and digits_eval.npz."""
    for path in (digits().model, digits().calib, digits().eval):
        shutil.copy(path, ".")


def run() -> Figures:
    """Run all steps in the current folder."""
    prepare()
    data = "--data digits_calib.npz --split 32"
    labelled = "--eval digits_eval.npz --metric top1"
    command(f"sbonnx quantize digits.onnx {data} --backend qnn -o phone.onnx {labelled}")
    failed = command("sbonnx lint phone.onnx --target qnn")
    figures = checked(f"sbonnx compare digits.onnx phone.onnx {data} --samples 4 --runtimes qnn {labelled}", "qnn")
    return figures | {"exit code of lint": failed, "kB of the file": size("phone.onnx")}


if __name__ == "__main__":
    main(run, __doc__)
