"""Everything a user can get wrong ends in one line that names the culprit, exit code 2, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sbonnx.cli import main
from tests.support import bad_models as models
from tests.support.bad_models import X, changed, content, external, opset
from tests.support.bad_place import check_line, good_place, line, state

Make = Callable[[Path], object]


def nothing(folder: Path) -> None:
    """The folder as it is: a good model and good data."""


def data(**arrays: Any) -> Make:
    """`d.npz` with other arrays."""
    return lambda folder: np.savez(folder / "d.npz", **arrays)


def recipe(text: str) -> Make:
    """`r.yaml` with this text."""
    return lambda folder: (folder / "r.yaml").write_text(text)


def both(*makes: Make) -> Make:
    """One after the other."""
    return lambda folder: [make(folder) for make in makes]


def empty_folder(folder: Path) -> None:
    (folder / "d").mkdir()


def pictures(folder: Path) -> None:
    (folder / "d").mkdir()
    (folder / "d" / "cat.jpg").write_bytes(b"\xff\xd8\xff")


def cut_npz(folder: Path) -> None:
    whole = (folder / "d.npz").read_bytes()
    (folder / "d.npz").write_bytes(whole[: len(whole) // 2])


def holed(value: float) -> Make:
    x = X.copy()
    x[2, 0, 0, 0] = value
    return data(x=x)


def link_to_model(folder: Path) -> None:
    (folder / "out" / "q.onnx").symlink_to(folder / "m.onnx")


@dataclass(frozen=True)
class Bad:
    """One bad input: how to make it, the command line, and what the one line must say."""

    name: str
    make: Make
    command: tuple[str, ...]
    words: tuple[str, ...]


STATIC = models.good(shape=[2, 3, 8, 8])
R = ("--recipe", "r.yaml")

TABLE = (
    # the model file
    Bad("missing", nothing, line(model="n.onnx"), ("ModelError", "n.onnx", "does not exist")),
    Bad("directory", models.directory, line(), ("ModelError", "m.onnx", "folder")),
    Bad("truncated", models.truncated, line(), ("ModelError", "m.onnx", "cut off")),
    Bad("zero bytes", content(b""), line(), ("ModelError", "m.onnx", "empty")),
    Bad("text", content(b"hello, this is no model\n"), line(), ("ModelError", "m.onnx", "text file")),
    Bad("npz called onnx", models.an_npz, line(), ("ModelError", "m.onnx", "zip")),
    Bad("torch file", models.a_torch_file, line(model="m.pt"), ("ModelError", "m.pt", "PyTorch")),
    Bad("external up", external("../w.bin"), line(), ("ModelError", "'w'", "../w.bin", "outside")),
    Bad("external absolute", external("/etc/hostname"), line(), ("ModelError", "'w'", "/etc/hostname", "outside")),
    Bad("external link", models.symlink_out, line(model="models/m.onnx"), ("ModelError", "'w'", "w.bin", "outside")),
    Bad("external missing", external("w.bin"), line(), ("ModelError", "'w'", "w.bin", "missing")),
    Bad("external short", external("w.bin", X[0, 0, 0]), line(), ("ModelError", "'w'", "w.bin", "cut off")),
    Bad("cyclic", changed(models.cyclic), line(), ("ModelError", "m.onnx", "conv", "cycle")),
    Bad("undefined tensor", changed(models.undefined), line(), ("ModelError", "'w'", "conv")),
    Bad("two producers", changed(models.twice), line(), ("ModelError", "'y'", "again")),
    Bad("opset too new", opset(999), line(), ("ModelError", "m.onnx", "opset 999")),
    Bad("opset 0", opset(0), line(), ("ModelError", "m.onnx", "opset 0")),
    Bad("no opset", opset(None), line(), ("ModelError", "m.onnx", "opset")),
    Bad("unknown op", changed(models.unknown_op), line(), ("ModelError", "Relux", "relu")),
    Bad("custom op", changed(models.custom_op), line(), ("ModelError", "Swirl", "com.acme")),
    Bad("channels differ", changed(models.wrong_rank), line(), ("DataError", "Conv", "channels")),
    Bad("values missing", changed(models.short_values), line(), ("ModelError", "'w'", "m.onnx")),
    Bad("NaN in a weight", changed(models.nan_weight), line(), ("NumericError", "NaN", "'conv'")),
    Bad("quantized already", models.quantized, line(), ("ModelError", "m.onnx", "qconv", "quantized already")),
    Bad("inspect text", content(b"text"), ("inspect", "m.onnx"), ("ModelError", "m.onnx")),
    Bad("plan of nothing", nothing, ("plan", "n.onnx"), ("ModelError", "n.onnx", "does not exist")),
    Bad(
        "compare with text", content(b"x"), ("compare", "m.onnx", "m.onnx", "--data", "d.npz"), ("ModelError", "m.onnx")
    ),
    # the data
    Bad("no data given", nothing, line(feeds=None), ("DataError", "--data FILE or FOLDER", "docs/data.md")),
    Bad("data missing", nothing, line(feeds="e.npz"), ("DataError", "e.npz")),
    Bad("empty folder", empty_folder, line(feeds="d"), ("DataError", "'d'", "empty")),
    Bad("folder of pictures", pictures, line(feeds="d"), ("DataError", "'d'", "images", "--preprocess")),
    Bad("model as data", nothing, line(feeds="m.onnx"), ("DataError", "m.onnx", ".npz")),
    Bad("no array for the input", data(y=X, z=X), line(), ("DataError", "d.npz", "'x'")),
    Bad("no batch axis", data(x=X[0]), line(), ("DataError", "d.npz", "'x'", "batch axis")),
    Bad("wrong size", data(x=X[:, :, :7]), line(), ("DataError", "d.npz", "'x'", "axis 2", "8")),
    Bad("fixed batch", lambda f: models.write(f, STATIC), line(), ("DataError", "'x'", "axis 0", "--split")),
    Bad("bytes", data(x=(X * 9).astype(np.uint8)), line(), ("DataError", "d.npz", "'x'", "uint8", "float32")),
    Bad("pickled", data(x=np.array([{"a": 1}], object)), line(), ("DataError", "d.npz", "pickle")),
    Bad("truncated npz", cut_npz, line(), ("DataError", "d.npz", "cut off")),
    Bad("text as npz", lambda f: (f / "d.npz").write_text("no"), line(), ("DataError", "d.npz", "np.savez")),
    Bad("NaN", holed(np.nan), line(), ("DataError", "'x'", "d.npz", "1 NaN", "sample 2")),
    Bad("infinite", holed(np.inf), line(), ("DataError", "'x'", "d.npz", "1 infinite", "sample 2")),
    Bad("no samples", data(x=X[:0]), line(), ("DataError", "d.npz", "no sample")),
    Bad("split 0", nothing, line("--split", "0"), ("DataError", "split", "0")),
    Bad("samples 0", nothing, line("--samples", "0"), ("RecipeError", "--samples", "0")),
    # the recipe
    Bad("recipe missing", nothing, line(*R), ("RecipeError", "r.yaml", "does not exist")),
    Bad("no YAML", recipe("W: [1, 2\nA: }"), line(*R), ("RecipeError", "r.yaml", "line 2")),
    Bad(
        "unknown key", recipe("W:\n  QUANTIZR: {BIT: 8}"), line(*R), ("RecipeError", "r.yaml", "QUANTIZR", "QUANTIZER")
    ),
    Bad("wrong type", recipe("W:\n  QUANTIZER: {BIT: many}"), line(*R), ("RecipeError", "W.QUANTIZER.BIT", "many")),
    Bad(
        "17 bits",
        recipe("BACKEND: virtual\nW: {QUANTIZER: {BIT: 17}}"),
        line(*R),
        ("RecipeError", "r.yaml", "17", "16"),
    ),
    Bad("4 bits", nothing, line("--backend", "tensorrt", "--bits", "w4a8"), ("RecipeError", "tensorrt", "4", "w4a0")),
    Bad(
        "affine tensorrt",
        recipe("BACKEND: tensorrt\nA: {QSCHEME: per-tensor-affine}"),
        line(*R),
        ("A.QSCHEME", "tensorrt"),
    ),
    Bad("no such node", recipe("EXCLUDE: [covn]"), line(*R), ("RecipeError", "EXCLUDE", "covn", "'conv'")),
    Bad("no such observer", recipe("A: {OBSERVER: {TYPE: maxmin}}"), line(*R), ("A.OBSERVER.TYPE", "maxmin", "minmax")),
    Bad(
        "two backends", recipe("BACKEND: tensorrt"), line(*R, "--backend", "virtual"), ("tensorrt", "virtual", "r.yaml")
    ),
    Bad("recipe is a folder", nothing, line("--recipe", "out"), ("RecipeError", "out", "directory")),
    Bad(
        "set without value", nothing, line("--set", "W.QUANTIZER.BIT"), ("RecipeError", "W.QUANTIZER.BIT", "KEY=VALUE")
    ),
    Bad(
        "set unknown key",
        nothing,
        line("--set", "W.QUANTISER.BIT=8"),
        ("RecipeError", "W.QUANTISER.BIT", "W.QUANTIZER.BIT"),
    ),
    Bad("bits", nothing, line("--bits", "eight"), ("RecipeError", "bits", "eight", "w8a8")),
    Bad("backend", nothing, line("--backend", "tensorflow"), ("RecipeError", "tensorflow", "tensorrt")),
    Bad("device", nothing, line("--device", "tpu"), ("RecipeError", "--device", "tpu", "cuda")),
    Bad("schema of a file", nothing, ("recipe", "r.yaml", "--schema"), ("RecipeError", "schema")),
    # the output
    Bad(
        "output exists",
        lambda f: (f / "out" / "q.onnx").write_text("mine"),
        line(),
        ("OutputError", "out/q.onnx", "--force"),
    ),
    Bad("output is input", nothing, line("--force", out="m.onnx"), ("OutputError", "m.onnx", "another name")),
    Bad("output links to input", link_to_model, line("--force"), ("OutputError", "out/q.onnx")),
    Bad("output is data", nothing, line("--force", out="d.npz"), ("OutputError", "d.npz", "another name")),
    Bad(
        "output is weights", external("w.bin", X[0, :, :2, :2]), line("--force", out="w.bin"), ("OutputError", "w.bin")
    ),
    Bad("no such folder", nothing, line(out="there/q.onnx"), ("OutputError", "there", "folder")),
    Bad("output is a folder", nothing, line(out="out"), ("OutputError", "'out'", "folder")),
    Bad("no output", nothing, ("quantize", "m.onnx", "--data", "d.npz"), ("OutputError", "-o")),
    Bad("report is model", nothing, line("--report", "m.onnx", "--force"), ("OutputError", "m.onnx")),
    Bad("report nowhere", nothing, line("--report", "there/r.json"), ("OutputError", "there")),
    Bad("simplify onto itself", nothing, ("simplify", "m.onnx", "-o", "m.onnx", "--force"), ("OutputError", "m.onnx")),
    # the command line
    Bad("no such verb", nothing, ("quantise", "m.onnx"), ("UsageError", "quantise", "--help")),
    Bad("no such option", nothing, line("--bit", "8"), ("UsageError", "--bit", "--bits", "sbonnx quantize --help")),
    Bad("no number", nothing, line("--split", "many"), ("UsageError", "--split", "integer", "sbonnx quantize --help")),
    Bad("no model", nothing, ("inspect",), ("UsageError", "MODEL", "sbonnx inspect --help")),
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return good_place(tmp_path, monkeypatch)


@pytest.mark.sampled(14)
@pytest.mark.parametrize("bad", TABLE, ids=lambda bad: bad.name)
def test_one_line_and_nothing_left(bad: Bad, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bad.make(place)
    before = state(place)
    code = main(bad.command)
    out, err = capfd.readouterr()
    check_line(code, out, err, bad.words)
    assert state(place) == before


def test_the_table_is_long_enough() -> None:
    assert len(TABLE) >= 35
    assert len({bad.name for bad in TABLE}) == len(TABLE)


def test_the_place_itself_is_good(place: Path) -> None:
    """Else the table would prove nothing."""
    before = state(place)
    assert main(line()) == 0
    after = state(place)
    assert after.pop("out/q.onnx")
    assert after == before


def test_json_does_not_half_print(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for command in (line("--json", feeds="e.npz"), ("inspect", "n.onnx", "--json"), ("plan", "n.onnx", "--json")):
        code = main(command)
        check_line(code, *capfd.readouterr(), ())


def test_cuda_without_cuda(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime can run on CUDA")
    before = state(place)
    code = main(line("--device", "cuda"))
    check_line(code, *capfd.readouterr(), ("DeviceError", "cuda", "sbonnx[gpu]"))
    assert state(place) == before
