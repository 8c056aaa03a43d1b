"""Scripts of the user that end the process or raise what is no `Exception`: one line and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from sbonnx.assets import digits
from sbonnx.cli import main
from sbonnx.errors import DataError, foreign_code, memory_failure, reason_of

RAISED = {
    "exit": "import sys\n{at}sys.exit(0)",
    "argparse": "import argparse\n{at}argparse.ArgumentParser().parse_args(['--unknown'])",
    "own": "class Own(BaseException): pass\n{at}raise Own('mine')",
    "generator": "{at}raise GeneratorExit('mine')",
    "str": "class Bad(Exception):\n    def __str__(self): raise SystemExit(0)\n{at}raise Bad",
}
SCRIPTS = {
    "load": "{top}\ndef go(*_):\n    return []\n",
    "call": "{top}\ndef go(*_):\n    {inner}\n",
}
OPTIONS = {
    "data": ["--data", "s.py:go"],
    "metric": ["--data", "{calib}", "--eval", "{eval}", "--metric", "s.py:go"],
    "decode": ["--data", "{calib}", "--eval", "{eval}", "--metric", "top1", "--decode", "s.py:go"],
}


@pytest.mark.sampled
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("when", SCRIPTS)
@pytest.mark.parametrize("kind", RAISED)
def test_one_line_and_exit_code_2(
    kind: str,
    when: str,
    option: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    *top, last = RAISED[kind].split("\n")
    inner = last.format(at="")
    text = SCRIPTS[when].format(top="\n".join([*top, *([inner] if when == "load" else [])]), inner=inner)
    Path("s.py").write_text(text.replace("{at}", ""))
    files = digits()
    words = [word.format(calib=files.calib, eval=files.eval) for word in OPTIONS[option]]
    assert main(["quantize", str(files.model), "-o", "q.onnx", "--samples", "2", *words]) == 2
    lines = [
        line for line in capsys.readouterr().err.splitlines() if not line.startswith(("usage:", "pytest", "__main"))
    ]
    (line,) = [line for line in lines if "unrecognized arguments" not in line]
    assert line.startswith(("RecipeError: ", "DataError: "))
    assert "s.py" in line or "--decode failed" in line
    assert not Path("q.onnx").exists()


def test_interrupts_and_own_errors_are_not_changed() -> None:
    for error in (KeyboardInterrupt(), DataError("said already")):
        with pytest.raises(type(error)) as caught, foreign_code(DataError):
            raise error
        assert caught.value is error


def test_messages_that_cannot_be_read() -> None:
    """Neither the reason nor the search for exhausted memory among the causes runs into them."""

    class Bad(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert reason_of(Bad()) == "Bad: "
    with (
        pytest.raises(DataError, match="because Bad: ") as caught,
        foreign_code(lambda why: DataError(f"because {why}")),
    ):
        raise Bad
    assert memory_failure(caught.value) is None
