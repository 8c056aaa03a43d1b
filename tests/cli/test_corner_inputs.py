"""Rare inputs of the command line: one line and exit code 2, never an internal error."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from sbonnx.assets import digits
from sbonnx.cli import main
from sbonnx.cli.output.error_lines import line_of
from tests.support.models import model

posix = pytest.mark.skipif(sys.platform == "win32", reason="there are no FIFOs, and working folders are not removed")


def said(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "internal error" not in line
    return line


def test_a_name_that_no_archive_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "y" * (1 << 16)
    shape: list[str | int | None] = ["N", 2]
    x, y = (helper.make_tensor_value_info(each, TensorProto.FLOAT, shape) for each in ("x", name))
    graph = helper.make_graph([helper.make_node("Relu", ["x"], [name])], "g", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    words = ["run", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "o.npz")]
    assert "is too long for .npz: drop -o" in said(words, capsys)
    assert not (tmp_path / "o.npz").exists()


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("h = MatMul (x, w0) y = MatMul (h, w1)", {"w0": (4, 0), "w1": (0, 3)}),
        ("h = MatMul (x, w0) r = Relu (h) y = MatMul (r, w1)", {"w0": (4, 0), "w1": (0, 3)}),
    ],
)
def test_pruning_of_empty_products(
    text: str, weights: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx.save(model(f"agraph (float[N,4] x) => (float[N,3] y) {{ {text} }}", **weights), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=np.zeros((2, 4), np.float32))
    words = ["prune", str(tmp_path / "m.onnx"), "--data", str(tmp_path / "d.npz"), "--macs", "0.5"]
    line = said([*words, "-o", str(tmp_path / "q.onnx")], capsys)
    assert "no channels of the model can be removed" in line


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_training_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(model("agraph (float[N,4] x) => (float[N,4] y) { y = Identity (x) }"), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=np.zeros((2, 4), np.float32))
    words = ["qat", str(tmp_path / "m.onnx"), "--data", str(tmp_path / "d.npz"), "-o", str(tmp_path / "q.onnx")]
    assert "neither weights nor scales that can be trained" in said(words, capsys)


def _large(path: Path) -> None:
    path.touch()
    os.truncate(path, 3 << 30)


REPORTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "deep": (lambda path: path.write_text("[" * 100_000), "is no JSON"),
    "fifo": (os.mkfifo, "it is a FIFO (named pipe), not a regular file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "it is a device, not a regular file"),
    "too large": (_large, "at most 536870912 are read"),
}


@posix
@pytest.mark.parametrize("kind", REPORTS)
def test_reports_that_are_none(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, message = REPORTS[kind]
    make(tmp_path / "r.json")
    assert message in said(["view", str(tmp_path / "r.json"), "--no-open", "-o", str(tmp_path / "p.html")], capsys)


@pytest.mark.slow
@posix
def test_a_working_folder_that_was_removed(tmp_path: Path) -> None:
    """Relative paths lead nowhere: the line says why."""
    folder = tmp_path / "gone"
    folder.mkdir()
    code = (
        "import os, sys, shutil; shutil.rmtree(os.getcwd()); from sbonnx.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    words = ["quantize", str(digits().model), "--data", str(digits().calib), "-o", "q.onnx"]
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=folder, check=False, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert "internal error" not in line


@posix
def test_the_line_about_a_removed_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(FileNotFoundError) as caught:
        os.path.abspath("x")
    assert line_of(caught.value).startswith("OSError: the working folder was removed")


def test_failures_in_destructors_of_a_cluster_client(capsys: pytest.CaptureFixture[str]) -> None:
    """Shown with --debug alone: a client without a scheduler fails in its destructor after the error was said."""
    code = (
        "import sys\n"
        "from sbonnx.cli import _undisturbed\n"
        "class Client:\n"
        "    def __del__(self): raise AttributeError('loop')\n"
        "Client.__del__.__module__ = 'distributed.client'\n"
        "class Own:\n"
        "    def __del__(self): raise AttributeError('own')\n"
        "with _undisturbed(bool(sys.argv[1])):\n"
        "    Client(), Own()\n"
    )
    for debug, shown in (("", False), ("1", True)):
        done = subprocess.run([sys.executable, "-c", code, debug], check=True, capture_output=True, text=True)
        assert "AttributeError: own" in done.stderr
        assert ("AttributeError: loop" in done.stderr) is shown
