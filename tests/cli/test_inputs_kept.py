"""Outputs of all verbs are never written over an input, nor into a folder that is read, ``--force`` or not."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx
import pytest

from sbonnx.assets import digits
from sbonnx.cli import main
from sbonnx.cli.app import rows_of_commands
from sbonnx.cli.options import Arguments
from sbonnx.errors import OutputError
from sbonnx.graph.storage.output_files import OTHER_FORMATS

SCRIPT = """import numpy as np

def feeds():
    return [{"image": np.zeros((1, 1, 8, 8), np.float32)}]

def metric(*_):
    return 0.0

def decode(outputs):
    return outputs
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with one file of each kind of input."""
    monkeypatch.chdir(tmp_path)
    files = digits()
    shutil.copyfile(files.model, "m.onnx")
    shutil.copyfile(files.calib, "calib.npz")
    shutil.copyfile(files.eval, "test.npz")
    Path("s.py").write_text(SCRIPT)
    Path("r.yaml").write_text("SAMPLES: 2\n")
    Path("o.json").write_text("{}")
    Path("p.yaml").write_text("scale: 1\n")
    Path("sbonnx.toml").write_text("quiet = true\n")
    Path("feeds").mkdir()
    shutil.copyfile(files.calib, "feeds/a.npz")
    model = onnx.load(files.model)
    onnx.save(model, "big.onnx", save_as_external_data=True, location="big.weights", size_threshold=0)
    return tmp_path


QUANTIZE = "quantize m.onnx --data calib.npz --force"


@pytest.mark.sampled(13)
@pytest.mark.parametrize(
    "line",
    [
        f"{QUANTIZE} --eval test.npz --metric top1 -o test.npz",
        f"{QUANTIZE} --eval test.npz --metric top1 -o q.onnx --save-recipe test.npz",
        f"{QUANTIZE} --recipe r.yaml -o r.yaml",
        f"{QUANTIZE} --recipe r.yaml -o q.onnx --save-recipe r.yaml",
        "quantize m.onnx --data s.py:feeds -o s.py --force",
        f"{QUANTIZE} --eval test.npz --metric s.py:metric -o s.py",
        f"{QUANTIZE} --eval test.npz --metric top1 --decode s.py:decode -o s.py",
        f"{QUANTIZE} --preprocess p.yaml -o p.yaml",
        f"{QUANTIZE} --backend qnn --overrides o.json -o q.onnx --report o.json",
        f"{QUANTIZE} -o sbonnx.toml",
        "quantize big.onnx --data calib.npz --force -o big.weights",
        "quantize m.onnx --data feeds --force -o feeds/q.onnx",
        "quantize m.onnx --data feeds --force -o feeds/a.npz",
        "run m.onnx --data calib.npz -o calib.npz --force",
        "run m.onnx --data feeds -o feeds/b.npz",
        "run m.onnx --data feeds -o feeds/out",
        "plan m.onnx --recipe r.yaml -o r.yaml --force",
        "view m.onnx --recipe r.yaml -o r.yaml --force --no-open",
        "prune m.onnx --data calib.npz --recipe r.yaml --macs 0.5 -o r.yaml --force",
        "prune m.onnx --data calib.npz --macs 0.5 --eval test.npz --metric top1 -o test.npz --force",
        "init m.onnx -o sbonnx.toml --force",
        "lint m.onnx --target onnxruntime --sarif sbonnx.toml --force",
    ],
)
def test_inputs_are_kept(
    line: str, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, before the work begins, and every file is as before."""
    monkeypatch.setattr("sys.dont_write_bytecode", True)  # of a metric's script
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    assert main(line.split()) == 2
    err = capsys.readouterr().err
    assert "an input of this run" in err
    assert len(err.splitlines()) == 1
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_models_next_to_the_model(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder of the ONNX model zoo has a model and test_data_set_*: the result may be next to the model."""
    shutil.copyfile("m.onnx", "feeds/m.onnx")
    words = ["quantize", "feeds/m.onnx", "--data", "feeds", "--no-verify", "--no-advice", "--force", "-o"]
    for _ in range(2):
        assert main([*words, "feeds/q.onnx"]) == 0
    for name in ("a.npz", "b.npz", "m.onnx"):
        assert main([*words, f"feeds/{name}"]) == 2
        assert "an input of this run" in capsys.readouterr().err
    assert main([*words, "q.onnx", "--report", "feeds/r.json"]) == 2
    assert Path("feeds/m.onnx").read_bytes() == Path("m.onnx").read_bytes()


def test_inputs_are_kept_by_functions(place: Path) -> None:
    """Functions of the package do not overwrite their inputs either."""
    import sbonnx

    evaluation = sbonnx.EvaluationData("test.npz", "top1")
    for output, recipe in (("m.onnx", None), ("r.yaml", "r.yaml"), ("test.npz", None), ("feeds/q.onnx", None)):
        with pytest.raises(OutputError, match="an input of this run"):
            sbonnx.quantize("m.onnx", "feeds", recipe=recipe, output=output, evaluation=evaluation, force=True)
    sbonnx.quantize("m.onnx", "calib.npz", output="test.npz", force=True, verify=False)  # no input of this run


def test_every_path_is_an_input_or_an_output(place: Path) -> None:
    """Each option of every verb that takes a path is one of both."""
    Path("x").touch()
    outputs = {"output", "report", "save_recipe", "trt_cache", "write_overrides", "trtexec", "cache", "sarif"}
    outputs |= {"mermaid", "checkpoint", "out"}
    for words, rows in rows_of_commands().items():
        for row in rows:
            if row.is_path:
                listed = "list" in str(row.type)
                read = Arguments({row: [Path("x")] if listed else Path("x")}).inputs()
                assert read == ([] if row.name in outputs else ["x"]), (words, row.name)


@pytest.mark.parametrize("suffix", [".json", ".textproto", ".onnxtxt", ".ORT"])
@pytest.mark.parametrize(
    "line",
    [
        "quantize m.onnx --data calib.npz -o q{}",
        "simplify m.onnx -o q{}",
        "prune m.onnx --data calib.npz --macs 0.5 -o q{}",
        "qat m.onnx --data calib.npz -o q{}",
    ],
)
def test_suffixes_of_other_formats(line: str, suffix: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`onnx.load` would read the written file in the format of its suffix."""
    assert main(line.format(suffix).split()) == 2
    assert f"'q{suffix}': models are written as protobuf, and {suffix} is another format" in capsys.readouterr().err
    assert not Path(f"q{suffix}").exists()


def test_other_formats_are_those_of_onnx() -> None:
    from onnx.serialization import registry

    formats = {suffix for suffix, name in registry._extension_to_format.items() if name != "protobuf"}
    assert formats | {".ort"} == OTHER_FORMATS
