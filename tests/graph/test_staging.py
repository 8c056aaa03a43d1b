"""A staged file moves to its place whole, and over nothing that the user did not give up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sbonnx.errors import ModelError, OutputError
from sbonnx.graph import load
from sbonnx.graph.files import check_target
from sbonnx.graph.staging import staged


def write(path: Path) -> None:
    """A model with a data file beside it."""
    path.write_bytes(b"model")
    path.with_name(f"{path.name}.data").write_bytes(b"weights")


def test_a_model_and_its_data_move_together(tmp_path: Path) -> None:
    with staged(tmp_path / "q.onnx") as path:
        write(path)
        assert not (tmp_path / "q.onnx").exists()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["q.onnx", "q.onnx.data"]


def test_a_data_file_that_is_there_needs_force(tmp_path: Path) -> None:
    theirs = tmp_path / "q.onnx.data"
    theirs.write_bytes(b"theirs")
    with pytest.raises(OutputError, match=r"q\.onnx\.data' exists"), staged(tmp_path / "q.onnx") as path:
        write(path)
    assert [file.name for file in tmp_path.iterdir()] == ["q.onnx.data"]
    assert theirs.read_bytes() == b"theirs"


def test_the_weights_of_the_input_are_never_written_over(tmp_path: Path) -> None:
    """Not even with force: the model that was read may keep its weights under the name that ours would get."""
    weights = tmp_path / "q.onnx.data"
    weights.write_bytes(b"input")
    with pytest.raises(OutputError, match="input"), staged(tmp_path / "q.onnx", [weights], force=True) as path:
        write(path)
    assert weights.read_bytes() == b"input"


def test_nothing_is_left_when_the_block_fails(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), staged(tmp_path / "q.onnx") as path:
        write(path)
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [b"m\xff.onnx", b"\xe9t\xe9/m.onnx"])
def test_paths_that_are_not_utf8(name: bytes, tmp_path: Path) -> None:
    """onnx's checker and onnxruntime take no such path."""
    path = Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), name)))
    path.parent.mkdir(exist_ok=True)
    path.touch()
    with pytest.raises(ModelError, match="path is not UTF-8; rename it"):
        load(path)
    with pytest.raises(OutputError, match="path is not UTF-8"):
        check_target(path.with_name(f"q{path.name}"), (), force=False)
