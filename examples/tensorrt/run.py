"""Quantize the bundled digits network for TensorRT, check it, and build the engine where there is a GPU.

    python -m examples.tensorrt.run out/

Needs no torch. The engine needs an NVIDIA GPU and trtexec, which is part of TensorRT.
"""

from __future__ import annotations

import shutil
import subprocess

from examples.commands import Figures, command, evaluation, main, size
from sbonnx import digits

TARGET = "tensorrt@10"
SECONDS = 600
"""Time limit of the build of an engine."""


def prepare() -> None:
    """Copy digits.onnx, digits_calib.npz and digits_eval.npz."""
    for path in (digits().model, digits().calib, digits().eval):
        shutil.copy(path, ".")


def build(script: str) -> bool:
    """Run the script with the trtexec command; return False if there is no trtexec."""
    if shutil.which("trtexec") is None:
        print(f"\n{script} not run: there is no trtexec on this machine")
        return False
    subprocess.run(["sh", script], check=True, timeout=SECONDS)
    return True


def run() -> Figures:
    """Run all steps in the current folder."""
    prepare()
    command(f"sbonnx plan digits.onnx --backend {TARGET}")
    quantize = f"sbonnx quantize digits.onnx --data digits_calib.npz --split 32 --backend {TARGET}"
    evaluated = "--eval digits_eval.npz --metric top1"
    command(f"{quantize} -o int8.onnx {evaluated} --trtexec build.sh --report int8.json")
    command(f"{quantize} -o int8_fp16.onnx --high-precision fp16 {evaluated} --report int8_fp16.json")
    failed = command(f"sbonnx lint int8.onnx --target {TARGET}")
    if build("build.sh"):
        command(
            f"sbonnx lint int8.onnx --target {TARGET} --engine-layers int8.layers.json "
            "--engine-profile int8.profile.json"
        )
    before, after = evaluation("int8.json")
    return {
        "top-1 float": before,
        "top-1 int8": after,
        "top-1 int8 and fp16": evaluation("int8_fp16.json")[1],
        "size of int8 / float": size("int8.onnx") / size("digits.onnx"),
        "exit code of lint": failed,
    }


if __name__ == "__main__":
    main(run, __doc__)
