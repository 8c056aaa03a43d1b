"""Makers of models that cannot be used, for the table of bad inputs. Each writes `m.onnx` into a folder."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from sbonnx.spec import Array

X = np.random.default_rng(0).standard_normal((4, 3, 8, 8)).astype(np.float32)

Maker = Callable[[Path], object]


def good(shape: Sequence[int | str] = ("N", 3, 8, 8)) -> onnx.ModelProto:
    """Conv, Relu, Conv with a dynamic batch: input `x` (N, 3, 8, 8), output `y` (N, 2, 8, 8)."""
    rng = np.random.default_rng(1)
    weight = rng.standard_normal((4, 3, 1, 1)).astype(np.float32)
    last = rng.standard_normal((2, 4, 1, 1)).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w"], ["c"], name="conv"),
            helper.make_node("Relu", ["c"], ["r"], name="relu"),
            helper.make_node("Conv", ["r", "v"], ["y"], name="last"),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(last, "v")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def write(folder: Path, model: onnx.ModelProto) -> None:
    """`model` as it is, unchecked."""
    (folder / "m.onnx").write_bytes(model.SerializeToString())


def changed(change: Callable[[onnx.ModelProto], object]) -> Maker:
    """The good model after `change`."""

    def make(folder: Path) -> None:
        model = good()
        change(model)
        write(folder, model)

    return make


def content(data: bytes) -> Maker:
    """A file of these bytes."""

    def make(folder: Path) -> None:
        (folder / "m.onnx").write_bytes(data)

    return make


def truncated(folder: Path) -> None:
    data = good().SerializeToString()
    (folder / "m.onnx").write_bytes(data[: len(data) // 2])


def directory(folder: Path) -> None:
    (folder / "m.onnx").unlink()
    (folder / "m.onnx").mkdir()


def an_npz(folder: Path) -> None:
    with open(folder / "m.onnx", "wb") as file:
        np.savez(file, x=X)


def a_torch_file(folder: Path) -> None:
    with zipfile.ZipFile(folder / "m.pt", "w") as archive:
        archive.writestr("m/data.pkl", b"\x80\x02}q\x00.")
        archive.writestr("m/version", b"3\n")


def external(location: str, data: Array | None = None, *, at: str | None = None) -> Maker:
    """The weight in external data at `location`; `data` is written to `at` (default: there)."""

    def make(folder: Path) -> None:
        model = good()
        weight = model.graph.initializer[0]
        weight.ClearField("raw_data")
        weight.data_location = TensorProto.EXTERNAL
        where = location.replace("{folder}", str(folder))
        weight.external_data.add(key="location", value=where)
        write(folder, model)
        if data is not None:
            (folder / (at or where)).write_bytes(data.tobytes())

    return make


def symlink_out(folder: Path) -> None:
    (folder / "elsewhere").mkdir()
    (folder / "models").mkdir()
    (folder / "elsewhere" / "w.bin").write_bytes(np.zeros(12, np.float32).tobytes())
    external("w.bin")(folder)
    (folder / "m.onnx").rename(folder / "models" / "m.onnx")
    (folder / "models" / "w.bin").symlink_to(folder / "elsewhere" / "w.bin")


def cyclic(model: onnx.ModelProto) -> None:
    model.graph.node[0].input[0] = "y"


def undefined(model: onnx.ModelProto) -> None:
    del model.graph.initializer[:]


def twice(model: onnx.ModelProto) -> None:
    model.graph.node.add().CopyFrom(helper.make_node("Relu", ["x"], ["y"], name="again"))


def opset(version: int | None) -> Maker:
    """Another version of the default domain, or none."""

    def change(model: onnx.ModelProto) -> None:
        del model.opset_import[:]
        if version is not None:
            model.opset_import.append(helper.make_opsetid("", version))

    return changed(change)


def unknown_op(model: onnx.ModelProto) -> None:
    model.graph.node[1].op_type = "Relux"


def custom_op(model: onnx.ModelProto) -> None:
    model.graph.node[1].op_type = "Swirl"
    model.graph.node[1].domain = "com.acme"
    model.opset_import.append(helper.make_opsetid("com.acme", 1))


def wrong_rank(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.zeros((4, 5, 1, 1), np.float32), "w"))


def short_values(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].raw_data = b"\0" * 8


def nan_weight(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.full((4, 3, 1, 1), np.nan, np.float32), "w"))


def quantized(folder: Path) -> None:
    node = helper.make_node("QLinearConv", ["x", "s", "z", "w", "s", "wz", "s", "z"], ["y"], name="qconv")
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, ["N", 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.UINT8, None)],
        [
            numpy_helper.from_array(np.ones((4, 3, 1, 1), np.int8), "w"),
            numpy_helper.from_array(np.float32(0.1), "s"),
            numpy_helper.from_array(np.uint8(128), "z"),
            numpy_helper.from_array(np.int8(0), "wz"),
        ],
    )
    write(folder, helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
