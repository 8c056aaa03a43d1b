"""Write the stored transcripts: python -m tests.transcripts."""

from __future__ import annotations

from tests.transcripts import FOLDER, TRANSCRIPTS

if __name__ == "__main__":
    for name, text in TRANSCRIPTS.items():
        (FOLDER / name).write_text(text())
