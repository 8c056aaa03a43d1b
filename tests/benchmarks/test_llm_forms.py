"""The table of export forms: one row for a folder, with its error and what the form asks for."""

from __future__ import annotations

from pathlib import Path

from benchmarks.llm.forms import HEADER, row, text_of
from tests.llm.tiny_decoder import decoder_model, write_folder


def test_a_row_for_each_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", decoder_model(tied=True))
    line = row(tmp_path, folder, tmp_path / "q")
    assert len(line) == len(HEADER)
    assert line[:3] == ["m", "optimum", "32"]
    assert 0.9 < float(line[3]) < 1.2 and 0 < float(line[4]) < 0.2 and abs(float(line[5]) - 1) < 0.01
    assert line[7:] == ["shared", ""]
    assert text_of([line]).count("| m | optimum |") == 1
