"""onnxruntime-web (WASM) in Node: the kernels of browsers, in a child process that reads feeds from files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import onnx

from sbonnx.backends.fixed_shapes import entries_of
from sbonnx.backends.runtime_types import Entry, ExecutedLayer, Runtime
from sbonnx.errors import DataError, DeviceError, ModelError

VERSION: Final = "1.30.0"
"""Release of onnxruntime-web that is documented."""

FOLDER: Final = "SBONNX_NODE_MODULES"
"""Environment variable with the folder ``node_modules`` that has onnxruntime-web."""

SECONDS: Final = 600.0
"""Time in which onnxruntime-web has to open a model, or to run a feed; then its process is ended."""

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


class WasmSession:
    """Model opened by onnxruntime-web in a Node process, which ends with the session.

    Args:
        model: path of an ONNX file, or a serialized model.
        threads: ignored: WASM in Node has one thread.
        seconds: time in which the model has to be opened, and each feed to be run.

    Raises:
        DeviceError: Node or onnxruntime-web is missing, does not start, or takes more time than that.
        ModelError: onnxruntime-web rejects the model.
    """

    def __init__(self, model: Path | bytes, threads: int | None = None, *, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        package, node = _package(), shutil.which("node")
        if package is None or node is None:
            raise DeviceError(absent() or NOT_INSTALLED)
        proto = onnx.load(str(model)) if isinstance(model, Path) else onnx.load_from_string(model)
        self._inputs, self._outputs = entries_of(proto)
        self._folder = TemporaryDirectory(prefix="sbonnx-wasm-")
        place = Path(self._folder.name)
        (place / "model.onnx").write_bytes(proto.SerializeToString())
        script = str(files("sbonnx.runtimes").joinpath("wasm_session.mjs"))
        self._process = subprocess.Popen(
            [node, script, str(package), str(place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        weakref.finalize(self, _end, self._process, self._folder)
        reply = self._reply()
        if "error" in reply:
            raise ModelError(f"onnxruntime-web refuses the model: {reply['error']}")

    def _reply(self) -> dict[str, Any]:
        """Read a line of the process, which is killed when the time is over."""
        assert self._process.stdout is not None
        late = threading.Event()

        def stop() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(self._seconds, stop)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line and late.is_set():
            raise DeviceError(f"onnxruntime-web gave no answer within {self._seconds:g} s: use fewer or smaller feeds")
        if not line:
            raise DeviceError(f"node ended with code {self._process.wait()}: onnxruntime-web did not start, or crashed")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def get_inputs(self) -> Sequence[Entry]:
        """Return the inputs in the order of the file."""
        return self._inputs

    def get_outputs(self) -> Sequence[Entry]:
        """Return the outputs in the order of the file."""
        return self._outputs

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, Any]) -> list[Any]:
        """Run the model and return the named outputs, or all; inputs that are missing in `feeds` raise KeyError.

        Raises:
            DataError: onnxruntime-web cannot run the feeds.
            DeviceError: its process has ended, or gives no answer in time.
        """
        place, request = Path(self._folder.name), []
        for number, entry in enumerate(self._inputs):
            values = np.ascontiguousarray(feeds[entry.name])
            (place / f"in{number}.bin").write_bytes(values.tobytes())
            request.append({"name": entry.name, "type": str(values.dtype), "dims": list(values.shape)})
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # `_reply` names the exit code
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        reply = self._reply()
        if "error" in reply:
            raise DataError(f"onnxruntime-web cannot run: {reply['error']}")
        outputs = {}
        for number, row in enumerate(reply["outputs"]):
            values = np.frombuffer((place / f"out{number}.bin").read_bytes(), np.dtype(row["type"]))
            outputs[row["name"]] = values.reshape(row["dims"])
        wanted = [entry.name for entry in self._outputs] if names is None else names
        return [outputs[name] for name in wanted]

    def layers(self) -> list[ExecutedLayer]:
        """Return no kernels: onnxruntime-web does not name them."""
        return []

    def fallback(self) -> tuple[str, ...]:
        """Return no nodes: all run in WASM."""
        return ()


def _end(process: subprocess.Popen[str], folder: TemporaryDirectory[str]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    folder.cleanup()


WASM: Final = Runtime("onnxruntime-web, WASM in Node", absent, WasmSession, name="wasm")
