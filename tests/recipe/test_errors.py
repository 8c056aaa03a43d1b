"""Every mistake is one line that says where, what was found and what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sbonnx.errors import RecipeError
from sbonnx.recipe import load, parse_qconfig

FILES: list[tuple[str | bytes, str]] = [
    ("- W\n- A\n", "r.yaml must be a mapping of keys to values, got ['W', 'A']"),
    ("8\n", "r.yaml must be a mapping of keys to values, got 8"),
    ("W:\n  QUANTIZER:\n    BIT: eight\n", "'W.QUANTIZER.BIT' in r.yaml line 3 must be 0 (float) or a whole number"),
    ("w:\n  quantizer: {bit: 17}\n", "'W.QUANTIZER.BIT' in r.yaml line 2 must be 0 (float) or a whole number"),
    ("W.QUANTIZER.BIT: -1\n", "'W.QUANTIZER.BIT' in r.yaml line 1 must be 0 (float)"),
    ("W: {QUANTIZER: {BIT: 8.5}}\n", "got 8.5"),
    ("W: {QUANTIZER: {BIT: true}}\n", "got True"),
    ("W: {QUANTIZER: {BIT: [8]}}\n", "got [8]"),
    ("W: {QUANTIZER: {DISABLE: 1}}\n", "'W.QUANTIZER.DISABLE' in r.yaml line 1 must be true or false, got 1"),
    (
        "W:\n  QUANTISER:\n    BIT: 8\n",
        "'W.QUANTISER' in r.yaml line 2 is not a key of the recipe. Did you mean QUANTIZER?",
    ),
    (
        "W: {QSCHEME: per-channel}\n",
        "'W.QSCHEME' in r.yaml line 1 must be per-tensor-symmetric, per-tensor-affine, per-",
    ),
    (
        "W: {OBSERVER: {MOVING_AVERAGE: {EMA_RATIO: 0.9}}}\n",
        "'W.OBSERVER.MOVING_AVERAGE' in r.yaml line 1 is not a key",
    ),
    ("W: {OBSERVER: {TYPE: MOVING_AVERAGE}}\n", "'W.OBSERVER.TYPE' in r.yaml line 1 is for activations (A) only"),
    ("W: {QUANTIZER: {TYPE: pact}}\n", "'W.QUANTIZER.TYPE' in r.yaml line 1 is for activations (A) only, got 'pact'"),
    ("A: {QUANTIZER: {TYPE: adaround}}\n", "'A.QUANTIZER.TYPE' in r.yaml line 1 is for weights (W) only"),
    ("A: {QUANTIZER: {TYPE: 8}}\n", "must be the name of a type, such as minmax or uniform, got 8"),
    ("A: {QUANTIZER: {PACT: {ALPHA_VALUE: 0}}}\n", "must be a number above 0, got 0"),
    (
        "A: {OBSERVER: {PERCENTILE: {ALPHA: 99.9}}}\n",
        "from 0 to below 0.5 (0.001 cuts the outermost 0.1 % on each side), got 99.9",
    ),
    ("A: {OBSERVER: {PERCENTILE: {ALPHA: .nan}}}\n", "got '.nan'"),
    ("A: {OBSERVER: {MOVING_AVERAGE: {EMA_RATIO: 1}}}\n", "from 0 to below 1, got 1"),
    ("A: {OBSERVER: {LAYOUT: NHWC}}\n", "'A.OBSERVER.LAYOUT' in r.yaml line 1 must be NCHW or NLC, got 'NHWC'"),
    ("W: 8\n", "'W' in r.yaml line 1 must be a mapping of keys to values, got 8"),
    ("SCHEDULE: [FUSE_BN]\n", "'SCHEDULE' in r.yaml line 1 must be a mapping"),
    (
        "BACKEND: tensort\n",
        "'BACKEND' in r.yaml line 1 must be virtual, onnxruntime, tensorrt, openvino, qnn or web, got",
    ),
    (
        "BACKEND: [tensorrt]\n",
        "'BACKEND' in r.yaml line 1 must be virtual, onnxruntime, tensorrt, openvino, qnn or web",
    ),
    ("DEVICE: gpu\n", "'DEVICE' in r.yaml line 1 must be auto, cpu, cuda or cuda:N, got 'gpu'"),
    ("A:\n  SPECIFIC:\n    conv: [QUANTIZER.BIT, 8]\n", "'A.SPECIFIC' in r.yaml line 2 must be a list, got"),
    ("A:\n  SPECIFIC:\n  - conv\n", "'A.SPECIFIC[0]' in r.yaml line 3 must be a mapping, got 'conv'"),
    (
        "A:\n  SPECIFIC:\n  - conv: 8\n",
        "'A.SPECIFIC[0]['conv']' in r.yaml line 3 must be [key, value, key, value, ...] or",
    ),
    ("A:\n  SPECIFIC:\n  - conv: [QUANTIZER.BIT]\n", "a key or a value is missing"),
    ("A:\n  SPECIFIC:\n  - conv: [8, QUANTIZER.BIT]\n", "8 is in the place of a key"),
    ("A:\n  SPECIFIC:\n  - a: [QUANTIZER.BIT, 8, QUANTIZER.BIT, 4]\n", "sets 'QUANTIZER.BIT' twice"),
    (
        "A:\n  SPECIFIC:\n  - conv*: [QUANTIZER.BITS, 8]\n",
        "'A.SPECIFIC[0]['conv*'].QUANTIZER.BITS' in r.yaml line 3 is not a key",
    ),
    (
        "A:\n  SPECIFIC:\n  - c: [QUANTIZER.BIT, 1]\n",
        "'A.SPECIFIC[0]['c'].QUANTIZER.BIT' in r.yaml line 3 must be 0 (float)",
    ),
    ("A:\n  SPECIFIC:\n  - c: [SPECIFIC, []]\n", "'A.SPECIFIC[0]['c'].SPECIFIC' in r.yaml line 3 is not a key"),
    ("A:\n  SPECIFIC:\n  - c: [QUANTIZER.TYPE, adaround]\n", "is for weights (W) only"),
    ("A:\n  SPECIFIC:\n  - 're:(': [QUANTIZER.BIT, 8]\n", "is not a regular expression"),
    ("EXCLUDE: ['']\n", "'EXCLUDE[0]' in r.yaml line 1 must not be an empty pattern, got ''"),
    ("EXCLUDE: ['op:']\n", "must not be an empty pattern, got 'op:'"),
    ("EXCLUDE: [123]\n", "must be text, got 123. Put names that look like numbers"),
    ("EXCLUDE: {conv: 1}\n", "'EXCLUDE' in r.yaml line 1 must be a list of patterns"),
    ("RANGES: {x: 3}\n", "'RANGES['x']' in r.yaml line 1 must be [lo, hi]"),
    ("RANGES: {x: [1, 0]}\n", "the lower one first, got [1, 0]"),
    ("RANGES: {x: [0, .inf]}\n", "two finite numbers"),
    ("RANGES: {'op:Conv': [0, 1]}\n", "is a pattern for nodes, and this key has tensors"),
    (
        "RANGES: {123: [0, 1]}\n",
        "has the key 123, which YAML does not read as text: put it in quotes (line 1, column 10)",
    ),
    ("RANGES: [x]\n", "'RANGES' in r.yaml line 1 must be a mapping, got ['x']"),
    ("SHARED_SCALES: [3]\n", "'SHARED_SCALES[0]' in r.yaml line 1 must be a list of patterns, got 3"),
    ("FIRST_BITS: 8w\n", "'FIRST_BITS' in r.yaml line 1 must be a form like w8a8"),
    ("FIRST_BITS: {W: 1}\n", "'FIRST_BITS.W' in r.yaml line 1 must be 0 (float)"),
    ("SAMPLES: 0\n", "'SAMPLES' in r.yaml line 1 must be a whole number, 1 or more, got 0"),
    ("CALIBRATION: {MEMORY: lots}\n", "'CALIBRATION.MEMORY' in r.yaml line 1 must be a size such as '2 GiB'"),
    ("CALIBRATION: {MEMORY: 0 GiB}\n", "must be more than 0 bytes"),
    ("CALIBRATION: {GRANULARITY: node}\n", "must be auto, whole, budget or layer, got 'node'"),
    ("CALIBRATION: {THREADS: 0}\n", "'CALIBRATION.THREADS' in r.yaml line 1 must be a whole number, 1 or more, got 0"),
    ("CALIBRATION: {CACHE: on}\n", "must be the path of a folder, or none, got True"),
    ("CALIBRATION: {ASYM: 1}\n", "'CALIBRATION.ASYM.ENABLE' in r.yaml line 1 must be true or false, got 1"),
    ("CALIBRATION: {ASYM: {ENABLED: true}}\n", "'CALIBRATION.ASYM.ENABLED' in r.yaml line 1"),
    ("CALIBRATION: {FEEDBACK: [a, b]}\n", "must be a mapping {output: input}"),
    ("CALIBRATION: {FEEDBACK: {h: 1}}\n", "must map names of outputs to names of inputs"),
    ("CALIBRATION: {FEEDBACK: {a: h, b: h}}\n", "feeds 'h' from two outputs, 'a' and 'b'"),
    ("CALIBRATION: {PICK: some}\n", "must be first or random, got 'some'"),
    ("CALIBRATION: {SEED: -1}\n", "must be a whole number, 0 or more, of up to 18 digits, got -1"),
    ("QUANTIZE_INPUTS_OF: {GEMM: true}\n", "'QUANTIZE_INPUTS_OF.GEMM' in r.yaml line 1 is not a key of the recipe"),
    ("A: {QADD: {ENABLE_QUANT: true}}\nQUANTIZE_INPUTS_OF: {ADD: false}\n", "contradicts QUANTIZE_INPUTS_OF.ADD"),
    (
        "w: {QSCHEME: per-tensor-affine}\nW: {QUANTIZER: {BIT: 8}}\n",
        "'W' in r.yaml line 2 is given twice, in two spellings",
    ),
    ("SAMPLES: 0\nDEVICE: gpu\nSIMPLIFY: 3\n", "3 problems: (1) 'DEVICE' in r.yaml line 2 must be"),
    ("W:\n  QSCHEME: a\nW:\n  QSCHEME: a\n", "r.yaml has the key 'W' twice in one mapping (line 3, column 1)"),
    ("W: {QUANTIZER: {BIT: 8}\nA: 3\n", "r.yaml is not YAML: line 2, column 1: expected ',' or '}'"),
    ("a: b: c\n", "r.yaml is not YAML: line 1, column 5"),
    ("\tW: 1\n", "r.yaml is not YAML: line 1, column 1"),
    ("W:\n\tBIT: 1\n", "that cannot start any token: indent with blanks"),
    ("W: 1\n---\nA: 1\n", "r.yaml is not YAML: line 2"),
    ("W: *nothing\n", "r.yaml is not YAML: line 1, column 4: found undefined alias"),
    ('W: "\\UFFFFFFFF"\n', "r.yaml is not YAML"),
    ('EXCLUDE: ["\\uD800"]\n', "not valid Unicode"),
    ("W: !!python/object:os.system x\n", "has the tag"),
    ("W: !mine {}\n", "has the tag '!mine', which has no meaning in a recipe (line 1, column 4)"),
    ("W: &w {QUANTIZER: *w}\n", "nested too deeply, or refers to itself"),
    ("[" * 5000, "nested too deeply"),
    ("W: " + "{a: " * 30 + "1" + "}" * 30, "nested too deeply"),
    (
        "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
        + "".join(f"{c}: &{c} [{','.join([f'*{p}'] * 10)}]\n" for p, c in zip("abcdefg", "bcdefgh", strict=True)),
        "contains more than",
    ),
    ("? [a]\n: 1\n", "has a key that is not text (line 1, column 3)"),
    ("W:\n  <<: 3\n", "merges (<<) something that is not a mapping"),
    (b"W: \x00\n", "r.yaml is not YAML: character '\\x00' is not allowed"),
    (b"# fine\nW: \xe9\n", "r.yaml is not UTF-8 text: line 2 has the byte 0xe9"),
    (b"\xff\xfeW\x00", "r.yaml is not UTF-8 text: line 1 has the byte 0xff"),
    ("#" * (5 << 20), "it has 5242880 bytes"),
]


@pytest.mark.sampled(15)
@pytest.mark.parametrize(("content", "message"), FILES, ids=range(len(FILES)))
def test_bad_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | bytes, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RecipeError) as caught:
        load("r.yaml")
    said = str(caught.value)
    assert message in said
    assert "\n" not in said and len(said) < 600


def test_bad_paths(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"is a directory; a recipe is a YAML file"):
        load(tmp_path)
    with pytest.raises(RecipeError, match=r"the recipe .*none.yaml does not exist"):
        parse_qconfig(tmp_path / "none.yaml")
    with pytest.raises(RecipeError, match="cannot be read"):
        load("nul\0.yaml")
    with pytest.raises(RecipeError, match="cannot be read"):
        load("x" * 5000)
    with pytest.raises(RecipeError, match="does not exist"):
        parse_qconfig("auto")  # a file, there


@pytest.mark.parametrize("source", [5, "", [], 1.5, b"W"])
def test_what_is_no_recipe(source: Any) -> None:
    with pytest.raises(RecipeError, match=r"a recipe is a file, a dict, 'auto' or None, got"):
        load(source)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({1: 2}, "the recipe has the key 1: keys are text"),
        ({("a",): 2}, "keys are text"),
        ({"W": {"QUANTIZER": {"BIT": 10**5000}}}, "got an integer of"),
        ({"SAMPLES": 10**5000}, "must be a whole number"),
        ({"EXCLUDE": {"a", "b"}}, "must be a list of patterns"),
        ({"RANGES": {1: [0, 1]}}, "must be text, got 1"),
        ({"RANGES": {"x": [0, 10**400]}}, "two finite numbers"),
        ({"EXCLUDE": ["\ud800"]}, "not valid Unicode"),
        ({"W": object()}, "must be a mapping of keys to values"),
    ],
)
def test_bad_dicts(source: Any, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(source)
    assert message in str(caught.value)


def test_a_dict_in_itself() -> None:
    source: dict[str, Any] = {}
    source["W"] = source
    with pytest.raises(RecipeError, match="nested too deeply, or refers to itself"):
        load(source)


BACKEND_RULES: list[tuple[dict[str, Any], str]] = [
    (
        {"BACKEND": "onnxruntime", "W.QUANTIZER.BIT": 9},
        "'W.QUANTIZER.BIT' in the recipe must be 2 to 8 for the backend onnx",
    ),
    ({"BACKEND": "onnxruntime", "A.QUANTIZER.BIT": 12}, "'A.QUANTIZER.BIT' in the recipe must be 2 to 8 or 16"),
    (
        {"BACKEND": "onnxruntime", "MODE": "dynamic", "W.QUANTIZER.BIT": 9},
        "(or 0 for float), got 9. BACKEND: virtual supports other widths",
    ),
    ({"BACKEND": "tensorrt", "A.QUANTIZER.BIT": 4}, "(or 0 for float), got 4. BACKEND: virtual supports other widths"),
    (
        {"BACKEND": "tensorrt", "A.QSCHEME": "per-tensor-affine"},
        "'A.QSCHEME' in the recipe must be per-tensor-symmetric",
    ),
    ({"BACKEND": "tensorrt", "A.QSCHEME": "per-channel-symmetric"}, "got 'per-channel-symmetric'"),
    (
        {"BACKEND": "onnxruntime", "A.QSCHEME": "per-channel-affine"},  # its integer kernels take one zero point
        "'A.QSCHEME' in the recipe must be per-tensor-affine or per-tensor-symmetric",
    ),
    (
        {"BACKEND": "tensorrt", "W.QSCHEME": "per-channel-affine"},
        "must be per-channel-symmetric or per-tensor-symmetric",
    ),
    ({"BACKEND": "tensorrt", "FIRST_BITS": "w5a8"}, "'FIRST_BITS.W' in the recipe must be 4 or 8"),
    ({"BACKEND": "onnxruntime", "LAST_BITS": {"A": 12}}, "'LAST_BITS.A' in the recipe must be 2 to 8 or 16"),
    (
        {"BACKEND": "tensorrt", "A.SPECIFIC": [{"x": ["QSCHEME", "per-tensor-affine"]}]},
        "'A.SPECIFIC[0]['x'].QSCHEME' in the recipe must be per-tensor-symmetric",
    ),
    (
        {"BACKEND": "onnxruntime", "W.QUANTIZER.BIT": 0, "W.SPECIFIC": [{}, {"x": {"QUANTIZER.BIT": 16}}]},
        "'W.SPECIFIC[1]['x'].QUANTIZER.BIT' in the recipe must be 2 to 8",
    ),
    ({"SCHEDULE.BN_TUNING": True, "W.QSCHEME": "per-tensor-symmetric"}, "when SCHEDULE.BN_TUNING is true"),
]


@pytest.mark.parametrize(("source", "message"), BACKEND_RULES)
def test_backend_rules(source: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(source)
    assert message in str(caught.value) and " problems: " not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        {"BACKEND": "tensorrt", "W.QUANTIZER.BIT": 0, "A.QUANTIZER.DISABLE": True, "A.QSCHEME": "per-tensor-affine"},
        {"BACKEND": "tensorrt", "W.QSCHEME": "per-tensor-symmetric", "FIRST_BITS": 0},
        {"BACKEND": "onnxruntime", "A.SPECIFIC": [{"x": ["QUANTIZER.BIT", 0]}]},
        {"SCHEDULE.BN_TUNING": True, "W.QSCHEME": "per-channel-affine"},
        *({"BACKEND": "virtual", "W.QUANTIZER.BIT": bits, "A.QUANTIZER.BIT": bits} for bits in range(2, 17)),
    ],
)
def test_backends_accept(source: dict[str, Any]) -> None:
    recipe = load(source)
    assert recipe.backend == source.get("BACKEND", "onnxruntime")


def test_what_is_wrong_everywhere_is_said_once() -> None:
    source = {"BACKEND": "tensorrt", "W.QUANTIZER.BIT": 4, "W.SPECIFIC": [{"x": ["OBSERVER.TYPE", "mse"]}]}
    with pytest.raises(RecipeError) as caught:
        load(source)
    assert "'W.QUANTIZER.BIT' in the recipe" in str(caught.value) and " problems: " not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"w_bits": 4}, "'w_bits' is not a key of the recipe. Did you mean w_bit"),
        ({"W.QUANTISER.BIT": 4}, "Did you mean W.QUANTIZER.BIT"),
        ({5: 4}, "the name of an override is text, got 5"),
        ({"bits": "w1"}, "bits= must be a form like w8a8"),
        ({"bits": None}, "got None"),
        ({"w_bit": "eight"}, "w_bit= (W.QUANTIZER.BIT) must be 0 (float)"),
        ({"W.QUANTIZER.BIT": "eight"}, "'W.QUANTIZER.BIT' in the overrides must be 0 (float)"),
        ({"w": 3}, "w= must be a mapping of keys to values, got 3"),
        ({"w": {"BIT": 3}}, "w= (W.BIT) is not a key of the recipe"),
        ({"RANGES.x": [0, 1]}, "Set RANGES as a whole"),
        (["W.QUANTIZER.BIT"], "an override is KEY=VALUE, got 'W.QUANTIZER.BIT'"),
        (["=4"], "an override is KEY=VALUE, got '=4'"),
        ([4], "an override is KEY=VALUE, got 4"),
        (["W.QUANTIZER.BIT="], "the override W.QUANTIZER.BIT has no value"),
        (["W.QUANTIZER.BIT=[1"], "the value of W.QUANTIZER.BIT is not YAML: line 1, column 3"),
        (["bits=w4a8", "w_bit=4"], "'W.QUANTIZER.BIT' is set twice in the overrides"),
        (["BACKEND=tflite"], "'BACKEND' in the overrides must be virtual, onnxruntime, tensorrt, openvino, qnn or web"),
        (['EXCLUDE=["\\uD800"]'], "not valid Unicode"),
        ("SIMPLIFY=perhaps", "'SIMPLIFY' in the overrides must be true or false, got 'perhaps'"),
    ],
)
def test_bad_overrides(overrides: Any, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(None, overrides=overrides)
    assert message in str(caught.value)


def test_an_override_that_the_backend_refuses_is_said_to_be_one(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("W: {QUANTIZER: {BIT: 8}}\nA: {QUANTIZER: {BIT: 8}}\n")
    with pytest.raises(RecipeError, match=r"bits= .W.QUANTIZER.BIT. must be 4 or 8 for the backend tens.*got w5"):
        load(file, backend="tensorrt", overrides={"bits": "w5a8"})


def test_near_keys_and_several_backends() -> None:
    """A near key needs no list of all of them."""
    with pytest.raises(RecipeError) as caught:
        load({"W": {"QUANTIZER": {"BITT": 4}}})
    assert "Did you mean BIT?" in str(caught.value) and "Keys here" not in str(caught.value)
    with pytest.raises(RecipeError) as caught:
        load(None, overrides={"fooo": 1})
    assert str(caught.value) == "'fooo' is not a key of the recipe. docs/recipe.md has all keys"
    wrong = {"BITS": "w4a8", "W": {"OBSERVR": 1}, "SAMPLES": 0, "SEED": 1, "MODE": "x"}
    with pytest.raises(RecipeError) as caught:
        load(wrong)
    text = str(caught.value)
    assert text.startswith("5 problems: (1) ") and "(4) " in text and text.endswith("; 1 more")
    assert "BITS is `W.QUANTIZER.BIT` here" in text and "Did you mean OBSERVER?" in text
    with pytest.raises(RecipeError, match="One backend a run: sbonnx batch quantizes for several"):
        load(None, backend="onnxruntime,tensorrt")


@pytest.mark.parametrize("backend", ["tflite", "", 5])
def test_unknown_backend_argument(backend: Any) -> None:
    with pytest.raises(
        RecipeError, match=r"the backend must be virtual, onnxruntime, tensorrt, openvino, qnn or web, got"
    ):
        load(None, backend=backend)
