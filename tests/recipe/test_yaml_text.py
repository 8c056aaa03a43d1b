"""A recipe is read in a bounded time, whatever it holds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sbonnx.errors import RecipeError
from sbonnx.options import parse_size
from sbonnx.recipe import load, node_patterns, yaml_text
from sbonnx.recipe.sections.whole import KEYS
from sbonnx.recipe.torch_modules import NodeInfo

MB = 1 << 20
SECONDS = 20.0
"""Forty times what was measured, ten times that under coverage; what was quadratic took minutes."""

LONGEST = yaml_text.MAX_TEXT - 10


def refused(run: Callable[[], object]) -> str:
    """The message of a refusal within `SECONDS` of processor time; "" where nothing is refused."""
    began = time.process_time()
    try:
        run()
        said = ""
    except RecipeError as error:
        said = str(error)
    assert time.process_time() - began < SECONDS
    assert len(said) < 900 and "\n" not in said
    return said


@pytest.mark.sampled(2)
@pytest.mark.parametrize("unit", ["9", "1.", "a", " ", "[", "a*", "%"])
def test_long_texts_as_values_and_names(unit: str) -> None:
    huge, long = (unit * (size // len(unit)) for size in (MB, LONGEST))
    for key in KEYS:
        refused(lambda key=key: load({key: long}))  # type: ignore[misc]
    for prefix in ("", "op:", "re:", "tensor:"):
        refused(lambda prefix=prefix: load({"EXCLUDE": [prefix + long]}))  # type: ignore[misc]
    sources: list[dict[str, Any]] = [{"SAMPLES": huge}, {huge: 1}, {"RANGES": {huge: [0, 1]}}, {"EXCLUDE": [huge]}]
    assert all("characters" in refused(lambda source=source: load(source)) for source in sources)  # type: ignore[misc]
    overrides: list[Any] = [{huge: 1}, [f"{huge}=1"], [f"SAMPLES={huge}"]]
    assert all(refused(lambda given=given: load(overrides=given)) for given in overrides)  # type: ignore[misc]
    assert refused(lambda: load(backend=huge))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("a: " + "9" * 9000, ""),
        ("a: " + "9" * MB, "contains a text of 1048576 characters"),
        ("a: '" + "x" * MB + "'", "contains a text of 1048576 characters"),
        ("x" * MB + ": 1", "contains a text of 1048576 characters"),
        ("a: [" + "1," * (MB // 2) + "]", "contains more than 2000 values"),
        ("a: {" + "a," * (MB // 2) + "}", "contains more than 2000 values"),
        ("- 1\n" * (MB // 4), "contains more than 2000 values"),
        ("[" * MB, "nested too deeply"),
    ],
    ids=lambda value: value[:8],
)
def test_texts_of_a_megabyte(content: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of values is lowered, as PyYAML takes some seconds for 100,000."""
    monkeypatch.setattr(yaml_text, "MAX_NODES", 2000)
    assert says in refused(lambda: yaml_text.parse(content, "r.yaml"))


@pytest.mark.parametrize(("size", "says"), [("9" * 400, "is no size"), ("9" * MB + "x", "is no size")])
def test_sizes_of_memory(size: str, says: str) -> None:
    assert says in refused(lambda: parse_size(size))


def test_special_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.yaml")
    (tmp_path / "device.yaml").symlink_to("/dev/zero")
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    assert "it is a FIFO" in refused(lambda: load(tmp_path / "fifo.yaml"))
    assert "it is a device" in refused(lambda: load(tmp_path / "device.yaml"))
    assert "cannot be read" in refused(lambda: load(tmp_path / "loop.yaml"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("slow", ["re:(a+)+", "re:" + "a*" * 60 + "b", "re:(a|aa)*(b|c*)"])
def test_regular_expressions_without_end(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_patterns, "TIME_LIMIT", 1.0)
    nodes = [NodeInfo("/layer/" + "a" * 60 + "!", "Conv"), NodeInfo("a" * 60 + "!", "Conv")]
    recipe = load({"EXCLUDE": ["re:.*/.*/a+.*", slow]})
    said = refused(lambda: recipe.for_model(nodes, []))
    assert "'EXCLUDE[1]' in the recipe takes longer than" in said


def test_regular_expressions_that_repeat_are_matched() -> None:
    recipe = load({"EXCLUDE": ["re:(/[^/]+)*/conv[0-9]+", "re:.*"]})
    recipe.for_model([NodeInfo("/block/conv1", "Conv")], ["y"])
    assert "matches no node" in refused(lambda: recipe.for_model([NodeInfo("/block/norm", "Conv")], []))
