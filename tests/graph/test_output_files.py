"""A staged file moves to its place whole, and over nothing that the user did not give up."""

from __future__ import annotations

from pathlib import Path

import pytest

from sbonnx.errors import OutputError
from sbonnx.graph.storage.output_files import staged


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
