"""Runtimes in a child process, whose crash or endless work ends the session alone.

The command gets a folder as its last argument and opens ``model.onnx`` in it. It answers with a line of JSON: the names
of nodes that fell back (`fallback`), or `error`. Each line of its input describes a feed, whose values are ``in0.bin``
and so on; it writes ``out0.bin`` and so on, and answers with their names, types and shapes, or with `error`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer
from typing import Any, Final

import numpy as np
import onnx

from sbonnx.backends.fixed_shapes import entries_of
from sbonnx.backends.runtime_types import Entry, ExecutedLayer
from sbonnx.errors import DataError, ModelError

SECONDS: Final = 300.0
"""Time in which a child process opens a model, and in which it runs a feed."""

ENGINE_SCRIPT: Final = files("sbonnx.runtimes").joinpath("engine_process.py")

PROBE: Final = "import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))"


class ChildSession:
    """Model opened in a child process, which ends with the session.

    Args:
        model: path of an ONNX file, or a serialized model.
        command: program and arguments, without the folder.
        title: name of the runtime in messages.
        seconds: limit of each answer.
        variables: of the environment, beside those of this process.

    Raises:
        ModelError: the runtime rejects the model, crashes, or does not answer in time.
    """

    def __init__(
        self,
        model: Path | bytes,
        command: Sequence[str],
        title: str,
        seconds: float = SECONDS,
        *,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        proto = onnx.load(str(model)) if isinstance(model, Path) else onnx.load_from_string(model)
        self._inputs, self._outputs = entries_of(proto)
        self._title, self._seconds = title, seconds
        self._folder = TemporaryDirectory(prefix="sbonnx-runtime-")
        place = Path(self._folder.name)
        (place / "model.onnx").write_bytes(proto.SerializeToString())
        self._process = subprocess.Popen(
            [*command, str(place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **(variables or {})},
        )
        weakref.finalize(self, _end, self._process, self._folder)
        reply = self._reply("opened the model")
        if "error" in reply:
            raise ModelError(f"{title} refuses the model: {reply['error']}")
        self._fallback = tuple(reply.get("fallback", ()))

    def _reply(self, task: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        timer = Timer(self._seconds, self._process.kill)
        timer.start()
        line = self._process.stdout.readline()
        late = timer.finished.is_set()
        timer.cancel()
        if not line:
            code = self._process.wait()
            how = f"with {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
            why = f"gave no answer in {self._seconds:g} s" if late else f"ended {how}"
            raise ModelError(f"{self._title} {why} while it {task}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def get_inputs(self) -> Sequence[Entry]:
        """Return the inputs in the order of the file."""
        return self._inputs

    def get_outputs(self) -> Sequence[Entry]:
        """Return the outputs in the order of the file."""
        return self._outputs

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, Any]) -> list[Any]:
        """Run the model and return the named outputs, or all; inputs that are missing in `feeds` raise KeyError."""
        place, request = Path(self._folder.name), []
        for number, entry in enumerate(self._inputs):
            values = np.ascontiguousarray(feeds[entry.name])
            (place / f"in{number}.bin").write_bytes(values.tobytes())
            request.append({"name": entry.name, "type": str(values.dtype), "dims": list(values.shape)})
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        reply = self._reply("ran a feed")
        if "error" in reply:
            raise DataError(f"{self._title} cannot run: {reply['error']}")
        outputs = {}
        for number, row in enumerate(reply["outputs"]):
            values = np.frombuffer((place / f"out{number}.bin").read_bytes(), np.dtype(row["type"]))
            outputs[row["name"]] = values.reshape(row["dims"])
        wanted = [entry.name for entry in self._outputs] if names is None else names
        return [outputs[name] for name in wanted]

    def layers(self) -> list[ExecutedLayer]:
        """Return no kernels: the runtime does not name them."""
        return []

    def fallback(self) -> tuple[str, ...]:
        """Return the nodes that the runtime leaves to another processor than its own."""
        return self._fallback


def _end(process: subprocess.Popen[str], folder: TemporaryDirectory[str]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    folder.cleanup()


def python_program(variable: str, engine: str) -> list[str]:
    """Return the command of `engine_process` for an engine, in the interpreter that an environment variable names."""
    return [os.environ.get(variable) or sys.executable, str(ENGINE_SCRIPT), engine]


def missing_packages(variable: str, packages: tuple[str, ...], fix: str) -> str | None:
    """Return `fix` if a package is missing in the interpreter that an environment variable names, else None."""
    python = os.environ.get(variable) or sys.executable
    try:
        return None if _has(python, packages) else fix
    except OSError as error:
        return f"{variable} names '{python}', which does not start ({error.strerror}): name a Python interpreter"


@cache
def _has(python: str, packages: tuple[str, ...]) -> bool:
    if python == sys.executable:
        return all(map(importlib.util.find_spec, packages))
    return subprocess.run([python, "-c", PROBE, *packages], capture_output=True, check=False).returncode == 0
