"""The stored transcripts of the command line. After a wanted change: python -m tests.transcripts."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.transcripts import FOLDER, help_texts, quantize_output

WRITE = "if this is wanted: python -m tests.transcripts"


def test_help() -> None:
    stored, found = (FOLDER / "help.txt").read_text(), help_texts()
    if stored.partition("\n")[0] != found.partition("\n")[0]:
        pytest.skip("another version of typer, which formats the help")
    assert found == stored, WRITE


@pytest.mark.slow
def test_output_of_quantize() -> None:
    """The words of each block: where tables wrap depends on the figures."""
    stored, found = (FOLDER / "quantize.txt").read_text(), quantize_output()
    for stored_block, found_block in zip(stored.split("\n\n"), found.split("\n\n"), strict=True):
        assert Counter(found_block.split()) == Counter(stored_block.split()), WRITE
