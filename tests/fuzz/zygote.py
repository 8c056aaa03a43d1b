"""Server that runs one command line after another, each in a forked child of its own.

Started as ``python -m tests.fuzz.zygote``. It imports what the commands need once, then reads one JSON request a line
from stdin and answers with one JSON line on stdout. A child that crashes, hangs or exhausts memory costs only itself.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

ADDRESS_SPACE: Final = 8 << 30
"""Bytes of address space of a child, so that a runaway case cannot exhaust the machine."""

POLL: Final = 0.002
SKIPPED: Final = ("torch", "distributed", "olive")
PROOF: Final = "proof.json"
"""File in which a child reports whether the result computes the same as its model."""


def preload() -> None:
    """Import every module of the package that plain quantization can load, and what they load."""
    import sbonnx

    def not_loaded(name: str) -> bool:
        return name.startswith(("sbonnx.qat", "sbonnx.torchnet")) or "cluster" in name

    def failed(name: str) -> None:
        if not not_loaded(name):
            raise  # noqa: PLE0704 - called while the exception is handled

    for module in pkgutil.walk_packages(sbonnx.__path__, "sbonnx.", onerror=failed):
        if not_loaded(module.name):
            continue
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            if error.name is None or error.name.partition(".")[0] not in SKIPPED:
                raise
    import onnxruntime

    onnxruntime.set_default_logger_severity(3)


def child(request: dict[str, Any], folder: Path, logs: Path) -> int:
    """Run the command line in `folder`; the exit code."""
    os.setsid()
    os.chdir(folder)
    tempfile.tempdir = str(logs / "tmp")
    os.environ["TMPDIR"] = tempfile.tempdir
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if request["file_size"] is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_size"], request["file_size"]))
    for fd, name in ((1, "out"), (2, "err")):
        target = os.open(logs / name, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(target, fd)
    empty, end = os.pipe()
    os.close(end)
    os.dup2(empty, 0)
    sys.stdin = os.fdopen(0, "r", closefd=False)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", closefd=False) for fd in (1, 2))
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    sys.argv = ["sbonnx", *request["argv"]]
    from sbonnx.cli import main
    from tests.support.toy_slack import toy_slack

    with toy_slack():
        code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    (logs / "ended").touch()
    if code == 0 and request["same"]:
        prove(logs / PROOF, *request["same"])
    return code


def prove(answer: Path, model: str, result: str) -> None:
    """Write to `answer` how the outputs of `result` differ from those of `model` in onnxruntime."""
    from tests.fuzz.same import difference

    answer.write_text(json.dumps(difference(Path(model), Path(result))))


def ended(pid: int, seconds: float) -> tuple[int, Any, bool]:
    """Wait for a child, and end its whole process group after `seconds`: status, resources, whether it hung."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        found, status, used = os.wait4(pid, os.WNOHANG)
        if found:
            return status, used, False
        time.sleep(POLL)
    os.killpg(pid, signal.SIGKILL)
    _, status, used = os.wait4(pid, 0)
    return status, used, True


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Run one request in a child and describe how it ended."""
    folder, logs = Path(request["folder"]), Path(request["logs"])
    start = time.monotonic()
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = child(request, folder, logs)
        finally:
            os._exit(code)
    status, used, hung = ended(pid, request["seconds"])
    proof = logs / PROOF
    return {
        "code": os.waitstatus_to_exitcode(status),
        "hung": hung,
        "ended": (logs / "ended").exists(),
        "seconds": time.monotonic() - start,
        "peak": used.ru_maxrss << 10,
        "proof": json.loads(proof.read_text()) if proof.exists() else None,
    }


def serve(arguments: Sequence[str] = ()) -> None:
    """Answer requests until stdin ends."""
    preload()
    gc.freeze()
    replies = os.fdopen(os.dup(1), "w")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    print(json.dumps({"ready": peak, "threads": len(os.listdir("/proc/self/task"))}), file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    serve()
