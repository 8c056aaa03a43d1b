"""Everything that can be wrong with a model file: one clear line, never another exception."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, ModelProto, TensorProto, helper, numpy_helper

from sbonnx.errors import ModelError
from sbonnx.graph import load
from tests.support.models import model

GOOD = "agraph (float[N,4] x) => (float[N,4] y) { h = Relu(x)  y = MatMul(h, w) }"


def good() -> ModelProto:
    return model(GOOD, w=(4, 4))


def parsed(text: str, opset: str = '"": 17') -> ModelProto:
    """A model from text, not checked."""
    made: ModelProto = onnx.parser.parse_model(f"<ir_version: 8, opset_import: [{opset}]> {text}")
    return made


def written(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


FILES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing": (lambda folder: folder / "none.onnx", "does not exist: check the path"),
    "missing folder": (lambda folder: folder / "none" / "m.onnx", "there is no folder .*, check the path"),
    "folder": (lambda folder: folder, "is a folder"),
    "empty": (lambda folder: written(folder / "m.onnx", b""), r"is empty \(0 bytes\)"),
    "text": (
        lambda folder: written(folder / "m.onnx", "hello, this is no model\n" * 9),
        "a text file: give the .onnx file",
    ),
    "json": (lambda folder: written(folder / "m.onnx", '{"a": [1, 2, 3]}'), "it is a text file"),
    "git lfs": (
        lambda folder: written(folder / "m.onnx", "version https://git-lfs.github.com/spec/v1\n"),
        "run git lfs pull",
    ),
    "noise": (
        lambda folder: written(folder / "m.onnx", np.random.default_rng(0).bytes(5000)),
        r"cut off \(.*\): copy or export",
    ),
    "zeros": (lambda folder: written(folder / "m.onnx", bytes(5000)), "not an ONNX model"),
    "other protobuf": (lambda folder: written(folder / "m.onnx", b"\x12\x03abc"), r"no graph|no ir_version"),
    "graph only": (lambda folder: written(folder / "m.onnx", good().graph.SerializeToString()), "not an ONNX model"),
    "png": (lambda folder: written(folder / "m.png", b"\x89PNG\r\n\x1a\n" + bytes(100)), "image: give the .onnx file"),
    "jpeg": (lambda folder: written(folder / "m.jpg", b"\xff\xd8\xff\xe0" + bytes(100)), "image: give the .onnx file"),
    "zip": (lambda folder: written(folder / "m.pt", b"PK\x03\x04" + bytes(100)), "it is a zip archive"),
}


@pytest.mark.parametrize("kind", FILES)
def test_files_that_are_no_model(kind: str, tmp_path: Path) -> None:
    make, says = FILES[kind]
    path = make(tmp_path)
    with pytest.raises(ModelError, match=says) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value) or kind in ("missing folder",)


@pytest.mark.parametrize("part", [0.05, 0.3, 0.5, 0.9, 0.999])
def test_a_file_that_is_cut_off(part: float, tmp_path: Path) -> None:
    whole = model(GOOD, w=(4, 4)).SerializeToString() + b""
    large = model("agraph (float[N,64] x) => (float[N,64] y) { y = MatMul(x, w) }", w=(64, 64)).SerializeToString()
    for number, content in enumerate((whole, large)):
        path = written(tmp_path / f"{number}.onnx", content[: max(1, int(len(content) * part))])
        with pytest.raises(ModelError, match=r"not an ONNX model, or it is cut off"):
            load(path)


def test_what_the_user_may_have_meant(tmp_path: Path) -> None:
    written(tmp_path / "resnet18.onnx", good().SerializeToString())
    with pytest.raises(ModelError, match=r"Similar names there: resnet18\.onnx"):
        load(tmp_path / "resnet-18.onnx")
    with pytest.raises(ModelError, match=r"Models there: resnet18\.onnx"):
        load(tmp_path / "b.onnx")
    with pytest.raises(ModelError, match=r"one of its files: resnet18\.onnx"):
        load(tmp_path)


def cyclic() -> ModelProto:
    return parsed("g (float[2] x) => (float[2] y) { a = Add(x, b)  b = Relu(a)  y = Neg(b) }")


def self_reading() -> ModelProto:
    return parsed("g (float[2] x) => (float[2] y) { y = Add(x, y) }")


def cyclic_through_a_branch() -> ModelProto:
    return parsed(
        """g (bool c, float[2] x) => (float[2] y) {
            a = If (c) <then_branch = t () => (float[2] p) { p = Relu(b) },
                        else_branch = e () => (float[2] q) { q = Neg(x) }>
            b = Neg(a)
            y = Neg(b) }"""
    )


def missing_initializer() -> ModelProto:
    return parsed("g (float[2] x) => (float[2] y) { y = Add(x, nowhere) }")


def missing_in_a_branch() -> ModelProto:
    return parsed(
        """g (bool c, float[2] x) => (float[2] y) {
            y = If (c) <then_branch = t () => (float[2] p) { p = Add(x, nowhere) },
                        else_branch = e () => (float[2] q) { q = Neg(x) }> }"""
    )


def missing_output() -> ModelProto:
    return parsed("g (float[2] x) => (float[2] y, float[2] nowhere) { y = Relu(x) }")


def two_producers() -> ModelProto:
    return parsed("g (float[2] x) => (float[2] y) { y = Relu(x)  y = Neg(x) }")


def produced_initializer() -> ModelProto:
    made = parsed("g (float[2] x) => (float[2] y) { w = Relu(x)  y = Neg(w) }")
    made.graph.initializer.append(numpy_helper.from_array(np.ones(2, np.float32), "w"))
    return made


def unknown_op() -> ModelProto:
    return parsed("g (float[2] x) => (float[2] y) { y = Frobnicate(x) }")


def op_of_a_newer_opset() -> ModelProto:
    return parsed("g (float[2] x) => (float[2] y) { y = Gelu(x) }")


def deprecated_op() -> ModelProto:
    return parsed("g (float[1,1,2,2] x, float[4] s) => (float[1,1,4,4] y) { y = Upsample(x, s) }")


def foreign_domain_not_imported() -> ModelProto:
    return parsed("g (float[2] x) => (float[2] y) { y = nvidia.Thing(x) }")


def no_opset() -> ModelProto:
    made = good()
    del made.opset_import[:]
    return made


def no_default_domain() -> ModelProto:
    return parsed("g (float[2] x) => (float[2] y) { y = com.microsoft.Gelu(x) }", '"com.microsoft": 1')


def with_opset(version: int) -> ModelProto:
    made = good()
    made.opset_import[0].version = version
    return made


def two_opsets() -> ModelProto:
    made = good()
    made.opset_import.add(domain="ai.onnx", version=13)
    return made


def newer_ir() -> ModelProto:
    made = good()
    made.ir_version = 99
    return made


def weight(change: Callable[[TensorProto], None]) -> Callable[[], ModelProto]:
    def make() -> ModelProto:
        made = good()
        change(made.graph.initializer[0])
        return made

    return make


def shorten(tensor: TensorProto) -> None:
    tensor.raw_data = tensor.raw_data[:-4]


def unknown_type(tensor: TensorProto) -> None:
    tensor.data_type = 99


def negative_shape(tensor: TensorProto) -> None:
    tensor.dims[0] = -4


def in_memory_external(tensor: TensorProto) -> None:
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="w.bin")


def forged_reference(tensor: TensorProto) -> None:
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="sbonnx.payload", value="0")


def duplicate_initializer() -> ModelProto:
    made = good()
    made.graph.initializer.add().CopyFrom(made.graph.initializer[0])
    return made


def empty_constant() -> ModelProto:
    made = parsed("g (float[2] x) => (float[2] y) { y = Relu(x) }")
    made.graph.node.insert(0, helper.make_node("Constant", [], ["c"]))
    return made


def recursive_function() -> ModelProto:
    made = parsed("g (float[2] x) => (float[2] y) { y = my.twice(x) }", '"": 17, "my": 1')
    domains = [helper.make_opsetid("", 17), helper.make_opsetid("my", 1)]
    body = [helper.make_node("twice", ["a"], ["b"], domain="my")]
    made.functions.append(helper.make_function("my", "twice", ["a"], ["b"], body, domains))
    return made


MODELS: dict[str, tuple[Callable[[], ModelProto], str]] = {
    "nothing": (ModelProto, "is empty"),
    "cyclic": (cyclic, r"depends on its own output: the graph has a cycle"),
    "reads itself": (self_reading, r"cycle"),
    "cyclic through a branch": (cyclic_through_a_branch, r"cycle"),
    "missing initializer": (missing_initializer, r"reads 'nowhere'"),
    "missing in a branch": (missing_in_a_branch, r"reads 'nowhere'"),
    "missing output": (missing_output, r"output 'nowhere'"),
    "two producers": (two_producers, r"'y' is given by both the Relu node of 'y' and the Neg node of 'y'"),
    "initializer and node": (produced_initializer, r"'w' is given by both an input or initializer and"),
    "duplicate initializer": (duplicate_initializer, r"lists initializer 'w' twice"),
    "unknown operator": (unknown_op, r"no operator 'Frobnicate'"),
    "operator of a newer opset": (op_of_a_newer_opset, r"opset 17 of ONNX has no operator 'Gelu'"),
    "deprecated operator": (deprecated_op, r"'Upsample' is deprecated in opset 17"),
    "domain not imported": (foreign_domain_not_imported, r"does not import the domain 'nvidia'"),
    "no opset": (no_opset, r"opset_import lacks the default domain"),
    "no default domain": (no_default_domain, r"opset_import lacks the default domain"),
    "opset of the future": (lambda: with_opset(999), r"opset 999; .* reads 1 to \d+"),
    "opset 0": (lambda: with_opset(0), r"opset 0; .* reads 1 to \d+"),
    "negative opset": (lambda: with_opset(-3), r"opset -3"),
    "two opsets": (two_opsets, r"two versions of the domain 'ai\.onnx'"),
    "IR version of the future": (newer_ir, r"IR version 99"),
    "short weight": (weight(shorten), r"'w'"),
    "unknown element type": (weight(unknown_type), r"element type 99"),
    "negative shape": (weight(negative_shape), r"'w'"),
    "external data of a model in memory": (weight(in_memory_external), r"'w\.bin': give the model's path"),
    "forged reference": (weight(forged_reference), r"not part of ONNX"),
    "Constant without value": (empty_constant, r"Constant"),
    "recursive function": (recursive_function, r"function"),
}


@pytest.mark.parametrize("kind", MODELS)
def test_models_that_are_wrong(kind: str, tmp_path: Path) -> None:
    make, says = MODELS[kind]
    with pytest.raises(ModelError, match=says) as caught:
        load(make())
    assert "\n" not in str(caught.value)
    content = make().SerializeToString()
    with pytest.raises(ModelError) as caught:
        load(written(tmp_path / "m.onnx", content))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("place", ["function", "node"])
def test_names_in_functions_that_are_not_text(place: str, tmp_path: Path) -> None:
    made = recursive_function()
    if place == "function":
        made.functions[0].name = "NAME"
    else:
        made.functions[0].node[0].op_type = "NAME"
    with pytest.raises(ModelError, match=r"the name b'N\\xffME' in it is not text, the file is damaged"):
        load(written(tmp_path / "m.onnx", made.SerializeToString().replace(b"NAME", b"N\xffME")))


def external(
    folder: Path, location: str, *, offset: int = 0, length: int | None = None, file: bytes | None = None
) -> Path:
    """A model in `folder/model` whose 16x16 weight lies at `location`."""
    made = model("agraph (float[N,16] x) => (float[N,16] y) { y = MatMul(x, w) }", w=(16, 16))
    tensor = made.graph.initializer[0]
    content = tensor.raw_data if file is None else file
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    entries = {"location": location, "offset": str(offset)} | ({} if length is None else {"length": str(length)})
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    home = folder / "model"
    home.mkdir(exist_ok=True)
    for place in (home / "w.bin", folder / "secret.bin"):
        place.write_bytes(content)
    return written(home / "m.onnx", made.SerializeToString())


def test_external_data_beside_the_model_is_read(tmp_path: Path) -> None:
    graph = load(external(tmp_path, "w.bin"))
    assert graph.nodes[0].inputs[1].shape == (16, 16)
    assert graph.info.files == (tmp_path / "model" / "m.onnx", (tmp_path / "model" / "w.bin").resolve())


@pytest.mark.parametrize(
    "location", ["../secret.bin", "../model/../secret.bin", "./../secret.bin", "/etc/hostname", "~root"]
)
def test_external_data_outside_the_folder_is_refused(location: str, tmp_path: Path) -> None:
    path = external(tmp_path, location)
    with pytest.raises(ModelError, match=r"outside the model's folder: refused|is missing next to"):
        load(path)


def test_an_absolute_path_is_refused_even_to_the_right_file(tmp_path: Path) -> None:
    path = external(tmp_path, str(tmp_path / "model" / "w.bin"))
    with pytest.raises(ModelError, match="outside the model's folder: refused"):
        load(path)


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    path = external(tmp_path, "link.bin")
    os.symlink(tmp_path / "secret.bin", path.parent / "link.bin")
    with pytest.raises(ModelError, match=r"'link\.bin', outside the model's folder: refused"):
        load(path)


def test_a_link_within_the_folder_is_followed(tmp_path: Path) -> None:
    path = external(tmp_path, "link.bin")
    os.symlink("w.bin", path.parent / "link.bin")
    assert load(path).nodes[0].inputs[1].shape == (16, 16)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"location": "gone.bin"}, r"'gone\.bin' with the values of tensor 'w' is missing next to"),
        ({"location": ""}, r"does not name its file"),
        ({"location": "."}, r"missing|outside"),
        ({"location": "w.bin", "file": b"short"}, r"'w' is declared at bytes 0 to 1024 of 'w\.bin', which has only 5"),
        ({"location": "w.bin", "file": b""}, r"which has only 0"),
        ({"location": "w.bin", "offset": 1000}, r"bytes 1000 to 2024 of 'w\.bin'"),
        ({"location": "w.bin", "offset": -8}, r"bytes -8"),
        ({"location": "w.bin", "length": 512}, r"needs 1024 bytes, and the model declares 512"),
        ({"location": "w\0.bin"}, r"'w\\x00\.bin', which is not a file: embedded null byte"),
        ({"location": "w" * 5000}, r"'w{100}\.\.\.', which is not a file: File name too long"),
    ],
)
def test_external_data_that_is_wrong(arguments: dict[str, object], says: str, tmp_path: Path) -> None:
    path = external(tmp_path, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=says):
        load(path)


def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    path = external(tmp_path, "loop.bin")
    os.symlink("loop.bin", path.parent / "loop.bin")
    with pytest.raises(ModelError, match=r"'loop\.bin', which is not a file: Symlink loop|'loop\.bin' .* is missing"):
        load(path)


def nested(depth: int, elements: int) -> bytes:
    """A model of Ifs within one another around a constant; protobuf itself writes what it does not read."""
    made = parsed("g (bool c) => (float[M] y) { }", '"": 17')
    scope = made.graph
    for _ in range(depth):
        node = scope.node.add(op_type="If", input=["c"], output=["y"])
        node.attribute.add(name="else_branch", type=AttributeProto.GRAPH).g.SetInParent()
        scope = node.attribute.add(name="then_branch", type=AttributeProto.GRAPH).g
        scope.name = "t"
        scope.output.add().CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, [elements]))
    scope.node.add(op_type="Constant", output=["y"]).attribute.append(
        helper.make_attribute("value", numpy_helper.from_array(np.zeros(elements, np.float32)))
    )
    content: bytes = made.SerializeToString()
    return content


@pytest.mark.parametrize("elements", [1, 10_000])
@pytest.mark.parametrize("depth", [32, 40, 2000])
def test_graphs_nested_too_deep(depth: int, elements: int, tmp_path: Path) -> None:
    """With 32, only the shape of the innermost output is too deep."""
    with pytest.raises(ModelError, match="its graphs are nested deeper than protobuf reads"):
        load(written(tmp_path / "m.onnx", nested(depth, elements)))


def test_a_path_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read: File name too long"):
        load(tmp_path / ("m" * 5000))


def test_an_unreadable_file(tmp_path: Path) -> None:
    path = written(tmp_path / "m.onnx", good().SerializeToString())
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    with pytest.raises(ModelError, match="cannot be read: Permission denied"):
        load(path)


@pytest.mark.parametrize("opset", [0, -1, 1000])
def test_an_opset_that_does_not_exist_is_refused(opset: int) -> None:
    with pytest.raises(ModelError, match=f"opset {opset} was requested; onnx .* supports 1 to"):
        load(good(), opset=opset)


def test_external_data_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    """The links lead out of the folder: the error names the command that writes files."""
    folder, blobs = tmp_path / "models--org--name" / "snapshots" / "1f", tmp_path / "models--org--name" / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    onnx.save(model("agraph (float[N,4] x) => (float[N,4] y) { y = MatMul (x, w) }", w=(4, 4)), tmp_path / "m.onnx")
    proto = onnx.load(tmp_path / "m.onnx")
    onnx.save(proto, folder / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    (folder / "m.data").rename(blobs / "c0")
    (folder / "m.data").symlink_to("../../blobs/c0")
    with pytest.raises(ModelError, match=r"`hf download org/name --local-dir FOLDER` writes files"):
        load(folder / "m.onnx")
