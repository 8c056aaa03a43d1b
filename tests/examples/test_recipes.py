"""The recipes of the examples: each runs its README's commands and gives the figures of the README's table."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.packaged import MODELS, model_of
from sbonnx.runtimes import RUNTIMES
from tests.e2e.test_readme import blocks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RECIPES = sorted(path.parent.name for path in EXAMPLES.glob("*/run.py"))
ROW = re.compile(r"^\| ([^|]+) \| (-?[\d.]+) \|$", re.MULTILINE)

SHARES, CHANGES, RELATIVE = 0.1, 0.05, 0.15
"""Tolerances of shares, of their differences from float, and relative ones of all else (kB, perplexity).

Training on another processor, or in another version of torch, gives other weights, and so another float figure; what
quantization costs differs less.
"""

PACKAGES = {
    "decoders": ["tokenizers"],
    "detector": ["PIL"],
    "encoder": ["tokenizers"],
    "image_folder": ["PIL"],
    "ocr": ["PIL"],
    "vision_transformer": ["sklearn"],
}
"""Packages of an example besides torch."""


WITHOUT_TORCH = {"browser": "wasm", "ocr": "", "phone": "qnn", "pitch": "", "tensorrt": ""}
"""Examples that train nothing, and the runtime that each one needs."""


def expected(name: str) -> dict[str, float]:
    """Return the figures of a README's table."""
    return {figure: float(value) for figure, value in ROW.findall((EXAMPLES / name / "README.md").read_text())}


def shown(name: str) -> list[list[str]]:
    """Return the words of each sbonnx command in the `sh` blocks of a README."""
    text = "\n".join(block.text for block in blocks(EXAMPLES / name / "README.md") if block.language == "sh")
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.startswith("sbonnx ")]


def printed(output: str) -> Iterator[list[str]]:
    """Yield the words of each command that a script printed."""
    return (shlex.split(line[2:]) for line in output.splitlines() if line.startswith("$ sbonnx "))


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_recipe(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Shares and sizes are those of the README, and so are the commands."""
    if name not in WITHOUT_TORCH:
        pytest.importorskip("torch")
    why = RUNTIMES[WITHOUT_TORCH[name]].absent() if WITHOUT_TORCH.get(name) else None
    if why:
        pytest.skip(why)
    for package in PACKAGES.get(name, ()):
        pytest.importorskip(package)
    if name in MODELS and model_of(name) is None:
        pytest.skip(f"needs the model in {MODELS[name][0]}")
    monkeypatch.chdir(tmp_path)
    figures = importlib.import_module(f"examples.{name}.run").run()
    wanted = expected(name)
    assert figures.keys() == wanted.keys()
    for figure, value in wanted.items():
        tolerance = SHARES if value <= 1 else RELATIVE * value
        assert figures[figure] == pytest.approx(value, abs=tolerance), figure
        first = next(other for other in wanted if other.partition(" ")[0] == figure.partition(" ")[0])  # of float
        if value <= 1:
            assert figures[figure] - figures[first] == pytest.approx(value - wanted[first], abs=CHANGES), figure
    assert list(printed(capsys.readouterr().out)) == shown(name)


def test_every_example_is_in_the_index() -> None:
    index = (EXAMPLES / "README.md").read_text()
    folders = {path.name for path in EXAMPLES.iterdir() if path.is_dir() and not path.name.startswith("_")}
    assert folders == set(re.findall(r"\]\((\w+)/", index))
