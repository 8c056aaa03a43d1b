"""Write a folder for browsers, and check its file in WebAssembly before it is released.

    python -m examples.browser.run out/

Needs Node.js and onnxruntime-web: ``npm install --ignore-scripts onnxruntime-web@1.30.0``.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from examples.commands import Figures, checked, command, main, size
from sbonnx import digits
from sbonnx.integrations.browser_folder import SUFFIXES

LIMIT = 100_000
"""Bytes that a page may download."""


def prepare() -> None:
    """Write the folder digits/, with a configuration and the model, and copy digits_calib.npz and digits_eval.npz."""
    Path("digits", "onnx").mkdir(parents=True)
    shutil.copy(digits().model, "digits/onnx/model.onnx")
    Path("digits", "config.json").write_text(json.dumps({"model_type": "digits"}))
    for path in (digits().calib, digits().eval):
        shutil.copy(path, ".")


def run() -> Figures:
    """Run all steps in the current folder."""
    prepare()
    data = "--data digits_calib.npz --split 32"
    labelled = "--eval digits_eval.npz --metric top1"
    command(f"sbonnx quantize digits {data} --backend web -o web --max-download {LIMIT} {labelled}")
    dtype = json.loads(Path("web", "config.json").read_text())["transformers.js_config"]["dtype"]["model"]
    print(f"chosen: {dtype}")
    chosen = f"web/onnx/model{SUFFIXES[dtype]}.onnx"
    figures = checked(
        f"sbonnx compare digits/onnx/model.onnx {chosen} {data} --samples 4 --runtimes wasm {labelled}", "wasm"
    )
    return figures | {"kB of the chosen file": size(chosen)}


if __name__ == "__main__":
    main(run, __doc__)
