"""onnxruntime-web (WASM) in Node: the kernels of browsers, in a child process that reads feeds from files."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Final

from sbonnx.backends.runtime_types import Runtime
from sbonnx.errors import DeviceError
from sbonnx.runtimes.child_session import ChildSession

VERSION: Final = "1.30.0"
"""Release of onnxruntime-web that is documented."""

FOLDER: Final = "SBONNX_NODE_MODULES"
"""Environment variable with the folder ``node_modules`` that has onnxruntime-web."""

NOT_INSTALLED: Final = (
    f"onnxruntime-web is not installed: npm install --ignore-scripts onnxruntime-web@{VERSION} here, or in a folder "
    f"whose node_modules {FOLDER} names"
)
NO_NODE: Final = "node is not on PATH: install Node.js 20 or later"


@cache
def _global_modules() -> Path | None:
    npm = shutil.which("npm")
    if npm is None:
        return None
    done = subprocess.run([npm, "root", "-g"], capture_output=True, text=True, check=False)
    return Path(done.stdout.strip()) if done.returncode == 0 else None


def _package() -> Path | None:
    """Return the folder of onnxruntime-web, or None."""
    named = os.environ.get(FOLDER)
    places = [Path(named)] if named else [Path("node_modules"), _global_modules()]
    packages = [place.resolve() / "onnxruntime-web" for place in places if place is not None]
    return next((package for package in packages if (package / "package.json").is_file()), None)


def absent() -> str | None:
    """Return why onnxruntime-web cannot run here, or None."""
    if shutil.which("node") is None:
        return NO_NODE
    return NOT_INSTALLED if _package() is None else None


class WasmSession(ChildSession):
    """Model opened by onnxruntime-web in a Node process, which ends with the session.

    Args:
        model: path of an ONNX file, or a serialized model.
        threads: ignored: WASM in Node has one thread.

    Raises:
        DeviceError: Node or onnxruntime-web is missing.
        ModelError: onnxruntime-web rejects the model, crashes, or does not answer in time.
    """

    def __init__(self, model: Path | bytes, threads: int | None = None) -> None:
        package, node = _package(), shutil.which("node")
        if package is None or node is None:
            raise DeviceError(absent() or NOT_INSTALLED)
        script = str(files("sbonnx.runtimes").joinpath("wasm_session.mjs"))
        super().__init__(model, [node, script, str(package)], "onnxruntime-web")


WASM: Final = Runtime("onnxruntime-web, WASM in Node", absent, WasmSession, name="wasm")
