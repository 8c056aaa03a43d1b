"""Questions of ``sbonnx quantize`` without arguments on a terminal: they result in a command line, which is shown."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

ASKING: Final = ["quantize"]
"""Command line that is answered by questions."""

Read = Callable[[str], str]
"""Shows a question and returns the answer, as `input` does."""

YES: Final = ("", "y", "yes")


def can_ask() -> bool:
    """Whether somebody can answer: input and outputs are terminals, and it is no run of a CI service."""
    return not os.environ.get("CI") and all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))


def ask(read: Read = input) -> list[str] | None:
    """Ask for model, data, preprocessing and target. Return the words of the command line; None: not confirmed."""
    print("sbonnx quantize: four questions, then the command. Ctrl-C stops.")
    model = _until("Model, a float .onnx file: ", read, _missing_file)
    data = _until("Data, a file or folder of samples (none: only weights are quantized): ", read, _missing_data)
    preprocess = "" if not data else read("Preprocessing of images, audio, texts, such as imagenet or a file (none): ")
    target = _until("Target: onnxruntime, tensorrt, openvino or qnn (onnxruntime): ", read, _unknown_target)
    words = [*ASKING, model]
    words += ["--data", data] if data else ["--mode", "weight_only"]
    words += ["--preprocess", preprocess.strip()] if preprocess.strip() else []
    words += ["--backend", target] if target else []
    words += ["-o", f"{Path(model).stem}.{'int8' if data else 'int4'}.onnx"]
    print(f"  sbonnx {shlex.join(words)}")
    return words if read("Run it? (yes) ").strip().lower() in YES else None


def _until(question: str, read: Read, wrong: Callable[[str], str]) -> str:
    """Repeat a question until its answer is right."""
    while True:
        answer = read(question).strip()
        answer = os.path.expanduser(answer)
        reason = wrong(answer)
        if not reason:
            return answer
        print(f"  {reason}")


def _missing_file(path: str) -> str:
    return "" if Path(path).is_file() else f"there is no file '{path}'"


def _missing_data(path: str) -> str:
    return "" if not path or ".py:" in path or Path(path).exists() else f"there is no file or folder '{path}'"


def _unknown_target(name: str) -> str:
    from sbonnx.errors import RecipeError
    from sbonnx.recipe.loading import backend_name

    try:
        backend_name(name or "onnxruntime")
    except RecipeError as error:
        return str(error)
    return ""
