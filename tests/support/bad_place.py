"""A place where a command goes wrong, and what must hold of it afterwards."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tests.support import bad_models as models


def good_place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`folder` with a good model, good data, an empty `out` and the temporary files; the working directory."""
    for name in ("out", "tmp"):
        (folder / name).mkdir()
    models.write(folder, models.good())
    np.savez(folder / "d.npz", x=models.X)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "tmp"))
    return folder


def line(
    *more: str, model: str = "m.onnx", feeds: str | None = "d.npz", out: str = "out/q.onnx", verb: str = "quantize"
) -> tuple[str, ...]:
    """The command line, in the folder."""
    return (verb, model, *(("--data", feeds) if feeds is not None else ()), "-o", out, *more)


def state(folder: Path) -> dict[str, str]:
    """Every path in a folder with a digest of what it holds."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


def check_line(code: int, out: str, err: str, words: tuple[str, ...]) -> None:
    """Exit code 2; one line on stderr with all `words`; nothing on stdout."""
    assert code == 2, err
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert not [word for word in words if word not in err], err
    assert "Traceback" not in err
    assert "internal error" not in err
