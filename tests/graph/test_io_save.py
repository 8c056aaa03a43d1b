"""Files are written whole or not at all, and never over what was read."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper, numpy_helper

import sbonnx
from sbonnx.errors import ModelError, OutputError
from sbonnx.graph import (
    Graph,
    copy,
    digest,
    drop_debug_metadata,
    exporter,
    load,
    node_metadata,
    save,
    set_node_metadata,
    to_proto,
)
from sbonnx.graph.edit import Names, add_constant
from sbonnx.graph.query import tensors_by_name
from tests.graph.editing import insert_after
from tests.support.models import model, run

ROOT = Path(__file__).resolve().parents[2]
TEXT = "agraph (float[N,64] x) => (float[N,64] y) { h = MatMul(x, w)  y = Add(h, b) }"
X = {"x": np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64)}


def source() -> ModelProto:
    return model(TEXT, w=(64, 64), b=64)


@pytest.fixture
def read(tmp_path: Path) -> Graph:
    """A graph read from `in.onnx` of the test's folder."""
    onnx.save(source(), tmp_path / "in.onnx")
    return load(tmp_path / "in.onnx")


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_inside_or_beside(read: Graph, tmp_path: Path) -> None:
    save(read, tmp_path / "inside.onnx")
    save(read, tmp_path / "beside.onnx", external_over=16_000)
    assert listing(tmp_path) == ["beside.onnx", "beside.onnx.data", "in.onnx", "inside.onnx"]
    assert (tmp_path / "beside.onnx.data").stat().st_size == 64 * 64 * 4
    want = run(source(), X)["y"]
    for name in ("inside.onnx", "beside.onnx"):
        onnx.checker.check_model(str(tmp_path / name), full_check=True)
        np.testing.assert_array_equal(run(str(tmp_path / name), X)["y"], want)
    outside = onnx.load(tmp_path / "beside.onnx", load_external_data=False)
    where = {entry.key: entry.value for entry in outside.graph.initializer[0].external_data}
    assert where == {"location": "beside.onnx.data", "offset": "0", "length": str(64 * 64 * 4)}


def test_tensors_of_a_data_file_start_at_pages(tmp_path: Path) -> None:
    graph = load(model(TEXT.replace("Add(h, b)", "MatMul(h, b)"), w=(64, 64), b=(64, 64)))
    names = Names(graph)
    third = add_constant(graph, "third", np.ones((257, 64), np.float32), names)
    insert_after(graph.outputs[0], "Add", graph=graph, names=names, inputs=[third])
    save(graph, tmp_path / "m.onnx", external_over=0)
    held = onnx.load(tmp_path / "m.onnx", load_external_data=False).graph.initializer
    places = [{entry.key: int(entry.value) for entry in t.external_data if entry.key != "location"} for t in held]
    assert len(places) == 3 and all(place["offset"] % 4096 == 0 for place in places)
    ends = [0, *(place["offset"] + place["length"] for place in places)]
    assert all(place["offset"] >= end for place, end in zip(places, ends, strict=False))
    assert (tmp_path / "m.onnx.data").stat().st_size == ends[-1]


def test_the_bytes_are_those_that_onnx_writes(tmp_path: Path) -> None:
    graph = load(source())
    save(graph, tmp_path / "m.onnx")
    expected = to_proto(graph)
    assert expected.graph.value_info
    del expected.graph.value_info[:]  # the source states no types of inner tensors, which readers infer
    assert (tmp_path / "m.onnx").read_bytes() == expected.SerializeToString(deterministic=True)


SCRIPT = """
import sys
from sbonnx.graph import load, save
save(load(sys.argv[1], opset=21), sys.argv[2])
"""


def test_bytes_do_not_depend_on_the_hash_seed(read: Graph, tmp_path: Path) -> None:
    contents = []
    for seed in ("0", "1"):
        out = tmp_path / f"{seed}.onnx"
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / "in.onnx"), str(out)]
        subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed})
        contents.append(out.read_bytes())
    assert contents[0] == contents[1]


def test_an_existing_file_stays_without_force(read: Graph, tmp_path: Path) -> None:
    target = tmp_path / "out.onnx"
    target.write_bytes(b"precious")
    with pytest.raises(OutputError, match=r"exists: give --force"):
        save(read, target)
    assert target.read_bytes() == b"precious" and listing(tmp_path) == ["in.onnx", "out.onnx"]
    save(read, target, force=True)
    np.testing.assert_array_equal(run(str(target), X)["y"], run(source(), X)["y"])


def test_an_existing_data_file_stays_without_force(read: Graph, tmp_path: Path) -> None:
    (tmp_path / "out.onnx.data").write_bytes(b"precious")
    with pytest.raises(OutputError, match=r"out\.onnx\.data' exists"):
        save(read, tmp_path / "out.onnx", external_over=0)
    assert listing(tmp_path) == ["in.onnx", "out.onnx.data"]


def test_the_input_is_never_written_over(read: Graph, tmp_path: Path) -> None:
    before = (tmp_path / "in.onnx").read_bytes()
    os.symlink("in.onnx", tmp_path / "link.onnx")
    os.link(tmp_path / "in.onnx", tmp_path / "hard.onnx")
    for name in ("in.onnx", "link.onnx", "hard.onnx", "../" + tmp_path.name + "/in.onnx"):
        with pytest.raises(OutputError, match="is an input of this run"):
            save(read, tmp_path / name, force=True)
    assert (tmp_path / "in.onnx").read_bytes() == before


def test_the_data_of_the_input_is_never_written_over(read: Graph, tmp_path: Path) -> None:
    save(read, tmp_path / "big.onnx", external_over=0)
    again = load(tmp_path / "big.onnx")
    before = (tmp_path / "big.onnx.data").read_bytes()
    with pytest.raises(OutputError, match="is an input of this run"):
        save(again, tmp_path / "big.onnx.data", force=True)
    assert (tmp_path / "big.onnx.data").read_bytes() == before


@pytest.mark.parametrize(("name", "says"), [("none/out.onnx", "there is no folder"), (".", "is a folder")])
def test_places_that_cannot_be_written(name: str, says: str, read: Graph, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=says):
        save(read, tmp_path / name)


def test_a_read_only_folder(read: Graph, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(0o500)
    if os.access(locked, os.W_OK):
        pytest.skip("this user may write everywhere")
    with pytest.raises(OutputError, match="cannot be written: Permission denied"):
        save(read, locked / "out.onnx")


FAILURES = [(OSError(errno.ENOSPC, "No space left on device"), OutputError), (KeyboardInterrupt(), KeyboardInterrupt)]


@pytest.mark.parametrize("external_over", [0, 1 << 40])
@pytest.mark.parametrize(("failure", "seen"), FAILURES)
def test_a_full_disk_or_an_interrupt_while_writing_leaves_the_old_files(
    failure: BaseException,
    seen: type[BaseException],
    external_over: int,
    read: Graph,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(made: exporter.Skeleton, number: int) -> Iterator[bytes]:
        yield b"some"
        raise failure

    for name in ("out.onnx", "out.onnx.data"):
        (tmp_path / name).write_bytes(b"precious")
    monkeypatch.setattr(exporter.Skeleton, "chunks", failing)
    with pytest.raises(seen):
        save(read, tmp_path / "out.onnx", force=True, external_over=external_over)
    assert listing(tmp_path) == ["in.onnx", "out.onnx", "out.onnx.data"]
    assert (tmp_path / "out.onnx").read_bytes() == (tmp_path / "out.onnx.data").read_bytes() == b"precious"


@pytest.mark.parametrize(("external_over", "moves"), [(0, 0), (0, 1), (1 << 40, 0)])
@pytest.mark.parametrize(("failure", "seen"), FAILURES)
def test_an_interrupt_while_files_move_to_their_places_leaves_none(
    failure: BaseException,
    seen: type[BaseException],
    external_over: int,
    moves: int,
    read: Graph,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = os.replace
    moved: list[Path] = []

    def replace(source: Path, target: Path) -> None:
        if len(moved) == moves:
            raise failure
        moved.append(target)
        real(source, target)

    monkeypatch.setattr("sbonnx.graph.storage.output_files.os.replace", replace)
    with pytest.raises(seen):
        save(read, tmp_path / "out.onnx", external_over=external_over)
    assert len(moved) == moves and listing(tmp_path) == ["in.onnx"]


def test_metadata_survives(tmp_path: Path) -> None:
    made = source()
    made.producer_name, made.producer_version, made.domain = "maker", "1.2", "org.example"
    made.model_version, made.doc_string = 7, "model doc"
    made.ir_version = 10
    made.metadata_props.add(key="author", value="me")
    made.graph.doc_string, made.graph.name = "graph doc", "the name"
    made.graph.metadata_props.add(key="g", value="1")
    made.graph.node[0].doc_string = "node doc"
    made.graph.node[0].metadata_props.add(key="n", value="2")
    made.graph.initializer[0].doc_string = "weight doc"
    made.graph.initializer[0].metadata_props.add(key="w", value="3")
    made.graph.input[0].doc_string = "input doc"
    made.graph.input[0].type.denotation = "TENSOR"
    made.graph.input[0].type.tensor_type.shape.dim[0].denotation = "DATA_BATCH"
    note = helper.make_tensor_value_info("h", 1, ["N", 64])
    note.doc_string = "value doc"
    note.metadata_props.add(key="v", value="4")
    made.graph.value_info.append(note)
    for node, name in zip(made.graph.node, ("first", "second"), strict=True):
        node.name = name
        node.ClearField("domain")  # the text form writes the default out
    save(load(made), tmp_path / "m.onnx")
    assert onnx.load(tmp_path / "m.onnx") == made


def test_debug_metadata_of_exporters_is_not_in_quantized_files(tmp_path: Path) -> None:
    """As torch's exporter writes it. The entries of users, and the paths of modules, are."""
    made = source()
    made.ir_version = 10
    trace = 'File "/home/author/export.py", line 32, in forward' * 40
    debug = {
        "namespace": ": __main__.Net/layer1: torch.nn.Linear",
        "pkg.torch.onnx.class_hierarchy": "['__main__.Net', 'torch.nn.Linear']",
        "pkg.torch.onnx.fx_node": "%linear : [num_users=1]",
        "pkg.torch.onnx.stack_trace": trace,
    }
    kept = {"pkg.torch.onnx.name_scopes": "['', 'layer1', 'linear']", "owner": "me"}
    for node in made.graph.node:
        for key, value in {**debug, **kept}.items():
            node.metadata_props.add(key=key, value=value)
    made.graph.metadata_props.add(key="pkg.torch.export.ExportedProgram.graph_signature", value="inputs: x")
    made.graph.input[0].metadata_props.add(key="namespace", value="of a user")
    graph = load(made)
    before = to_proto(graph).SerializeToString()
    copied = copy(graph)
    dropped = drop_debug_metadata(copied)
    file = to_proto(copied)
    assert to_proto(graph).SerializeToString() == before
    assert dropped == pytest.approx(len(before) - len(file.SerializeToString()), abs=16)
    for node in file.graph.node:
        assert {entry.key: entry.value for entry in node.metadata_props} == kept
    assert not file.graph.metadata_props
    assert [entry.value for entry in file.graph.input[0].metadata_props] == ["of a user"]
    assert drop_debug_metadata(copied) == 0
    shape = [4 if isinstance(size, str) else size for size in graph.inputs[0].shape]
    feeds = [{"x": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}]
    report = sbonnx.quantize(made, feeds, output=tmp_path / "q.onnx", backend="virtual", verify=False)
    assert trace not in (tmp_path / "q.onnx").read_bytes().decode(errors="replace")
    assert any("debug metadata" in note for note in report.notes)


@pytest.mark.parametrize(
    ("key", "opset", "version"), [("sbonnx.bits", 17, 8), ("sbonnx.bits", 21, 10), ("who", 17, 10)]
)
def test_new_metadata_is_written_and_read(key: str, opset: int, version: int, tmp_path: Path) -> None:
    """Own metadata of nodes does not raise the IR version, which older runtimes refuse: it is in that of the model."""
    graph = load(source(), opset=opset)
    set_node_metadata(graph, graph.nodes[0].name, key, "8")
    set_node_metadata(graph, graph.nodes[0].name, key, "4")
    save(graph, tmp_path / "m.onnx")
    written = onnx.load(tmp_path / "m.onnx")
    onnx.checker.check_model(written, full_check=True)
    assert source().ir_version == 8
    assert written.ir_version == version
    assert bool(written.graph.node[0].metadata_props) == (version == 10)
    again = load(written)
    assert node_metadata(again, graph.nodes[0].name) == {key: "4"}
    assert "sbonnx.nodes" not in again.info.metadata
    assert to_proto(again).SerializeToString() == to_proto(load(tmp_path / "m.onnx")).SerializeToString()


def test_damaged_metadata_of_nodes_is_an_error() -> None:
    proto = source()
    proto.metadata_props.add(key="sbonnx.nodes", value="[1")
    with pytest.raises(ModelError, match=r"'sbonnx.nodes' cannot be read"):
        load(proto)


@pytest.mark.parametrize(("opset", "ir_version"), [(13, 8), (17, 8), (21, 10), (23, 11)])
def test_the_ir_version_is_raised_only_as_the_opset_needs(opset: int, ir_version: int) -> None:
    made = source()
    made.opset_import[0].version = 13
    assert to_proto(load(made, opset=opset)).ir_version == ir_version


def test_quantization_annotations_go_with_their_tensors() -> None:
    made = source()
    made.graph.initializer.append(numpy_helper.from_array(np.float32(0.1), "scale"))
    made.graph.node.append(helper.make_node("Mul", ["h", "scale"], ["z"], name="mul"))
    made.graph.output.append(helper.make_tensor_value_info("z", 1, ["N", 64]))
    for tensor, scale in (("h", "scale"), ("h", "gone")):
        note = made.graph.quantization_annotation.add(tensor_name=tensor)
        note.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value=scale)
    written = to_proto(load(made))
    kept = [note.quant_parameter_tensor_names[0].value for note in written.graph.quantization_annotation]
    assert kept == ["scale"]


def test_digest_is_of_structure_and_weights(tmp_path: Path) -> None:
    graph = load(source())
    first = digest(graph)
    assert digest(load(source())) == first
    for external_over in (0, 1 << 40):
        path = tmp_path / str(external_over) / "m.onnx"
        path.parent.mkdir()
        save(graph, path, external_over=external_over)
        assert digest(load(path)) == first
    graph.info.metadata["who"] = "me"
    assert digest(graph) == first
    other = source()
    changed = numpy_helper.to_array(other.graph.initializer[0]).copy()
    changed[3, 4] += 1
    other.graph.initializer[0].CopyFrom(numpy_helper.from_array(changed, "w"))
    assert digest(load(other)) != first
    insert_after(tensors_by_name(graph)["h"], "Relu", graph=graph, names=Names(graph))
    assert digest(graph) != first


def test_an_input_without_a_type_cannot_be_saved(tmp_path: Path) -> None:
    graph = load(source())
    graph.inputs[0].dtype = None
    with pytest.raises(ModelError, match="input 'x' has no known element type"):
        save(graph, tmp_path / "m.onnx")
    assert listing(tmp_path) == []


def test_an_attribute_that_onnx_does_not_have_is_named() -> None:
    graph = load(source())
    graph.nodes[0].attrs["odd"] = {"a": object()}
    with pytest.raises(ModelError, match="attribute 'odd' of node 'MatMul_0' is a dict"):
        to_proto(graph)


def test_long_metadata_of_nodes_is_compressed_and_read(tmp_path: Path) -> None:
    graph = load(source(), opset=17)
    expected = {f"sbonnx.{number}": "the same text in each entry" for number in range(200)}
    for key, value in expected.items():
        set_node_metadata(graph, graph.nodes[0].name, key, value)
    save(graph, tmp_path / "m.onnx")
    (entry,) = onnx.load(tmp_path / "m.onnx").metadata_props
    assert entry.key == "sbonnx.nodes" and len(entry.value) < 1500 < len(str(expected))
    assert node_metadata(load(tmp_path / "m.onnx"), graph.nodes[0].name) == expected
    damaged = onnx.load(tmp_path / "m.onnx")
    damaged.metadata_props[0].value = entry.value[:-20]
    with pytest.raises(ModelError, match=r"'sbonnx.nodes' cannot be read"):
        load(damaged)
