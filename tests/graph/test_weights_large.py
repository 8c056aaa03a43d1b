"""Models larger than protobuf can hold, in memory that does not grow with them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from sbonnx.graph import load, save
from sbonnx.graph.edit import Names, add_constant
from sbonnx.graph.query import constant, tensors_by_name
from sbonnx.graph.storage.weights import SPILL_BYTES, ScratchFiles, array_chunks, release_pages, spill
from tests.support.models import run

ROOT = Path(__file__).resolve().parents[2]
ROWS, LAYERS = 4096, 40  # 40 weights of 64 MiB: 2.5 GiB of float32
LIMIT_MIB = 300

ROUND_TRIP = """
import re, sys
import sbonnx.graph as graphs
from sbonnx.graph.edit import Names
from tests.graph.editing import insert_after
from sbonnx.graph.query import tensors_by_name

def kibibytes(key):
    return int(re.search(key + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1])

before = kibibytes("VmRSS")
graph = graphs.load(sys.argv[1])
insert_after(tensors_by_name(graph)["h3"], "Relu", graph=graph, names=Names(graph))
shared = graph.nodes[0].inputs[1].values.sum()  # one weight is read whole on the way
graphs.save(graph, sys.argv[2])
print(int(shared), (kibibytes("VmHWM") - before) // 1024)
"""


def write_sparse(folder: Path, layers: int = LAYERS) -> Path:
    """A chain of MatMuls whose weights are holes in a file, but for a few numbers in each."""
    size = ROWS * ROWS * 4
    tensors = []
    with open(folder / "big.bin", "wb") as file:
        file.truncate(size * layers)
        for layer in range(layers):
            file.seek(size * layer)
            file.write(np.arange(layer, layer + 4, dtype=np.float32).tobytes())
            tensor = TensorProto(name=f"w{layer}", data_type=TensorProto.FLOAT, dims=[ROWS, ROWS])
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", "big.bin"), ("offset", str(size * layer)), ("length", str(size))):
                tensor.external_data.add(key=key, value=value)
            tensors.append(tensor)
    nodes = [helper.make_node("MatMul", [f"h{n}", f"w{n}"], [f"h{n + 1}"], name=f"m{n}") for n in range(layers)]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", ROWS]) for name in ("h0", f"h{layers}")]
    graph = helper.make_graph(nodes, "big", ends[:1], ends[1:], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = folder / "big.onnx"
    path.write_bytes(model.SerializeToString())
    return path


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")


@LINUX
@pytest.mark.slow
def test_two_and_a_half_gibibytes_round_trip_in_flat_memory(tmp_path: Path) -> None:
    source, target = write_sparse(tmp_path), tmp_path / "out" / "big.onnx"
    target.parent.mkdir()
    command = [sys.executable, "-c", ROUND_TRIP, str(source), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    total, grown = map(int, done.stdout.split())
    assert total == 0 + 1 + 2 + 3
    assert grown < LIMIT_MIB, f"{grown} MiB"
    data = target.with_name("big.onnx.data")
    assert data.stat().st_size == ROWS * ROWS * 4 * LAYERS
    loaded = load(target)
    last = constant(tensors_by_name(loaded)[f"w{LAYERS - 1}"])
    assert last is not None and last[0, :5].tolist() == [39, 40, 41, 42, 0]
    onnx.checker.check_model(str(target))
    assert [node.op for node in loaded.nodes].count("Relu") == 1


@LINUX
@pytest.mark.slow
def test_an_all_in_one_file_is_mapped_not_held(tmp_path: Path) -> None:
    """512 MiB inside one file: parsing it whole would take at least that."""
    weight = helper.make_tensor("w0", TensorProto.FLOAT, [1], [1.0])
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N"]) for name in ("h0", "h3")]
    nodes = [helper.make_node("Add", [f"h{n}", f"w{n}"], [f"h{n + 1}"], name=f"m{n}") for n in range(3)]
    graph = load(
        helper.make_model(
            helper.make_graph(nodes, "big", ends[:1], ends[1:], [weight, *(_renamed(weight, n) for n in (1, 2))]),
            opset_imports=[helper.make_opsetid("", 17)],
            ir_version=8,
        )
    )
    names = Names(graph)
    for node in graph.nodes[:2]:
        node.inputs[1] = add_constant(graph, "large", np.ones(1 << 26, np.float32), names)
    middle = tmp_path / "middle.onnx"
    save(graph, middle, external_over=1 << 30)
    assert middle.stat().st_size > 1 << 29
    script = ROUND_TRIP.replace('"h3"', '"h2"').replace(".values.sum()", ".values[:10].sum()")
    command = [sys.executable, "-c", script, str(middle), str(tmp_path / "again.onnx")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    total, grown = map(int, done.stdout.split())
    assert total == 10
    assert grown < LIMIT_MIB, f"{grown} MiB"


def _renamed(tensor: TensorProto, number: int) -> TensorProto:
    copied = TensorProto()
    copied.CopyFrom(tensor)
    copied.name = f"w{number}"
    return copied


@pytest.mark.slow
def test_a_large_new_constant_goes_to_a_scratch_file_and_survives_saving(tmp_path: Path) -> None:
    values = np.arange(SPILL_BYTES // 4, dtype=np.int32)
    ends = [helper.make_tensor_value_info(name, TensorProto.INT32, [1]) for name in ("x", "y")]
    nodes = [helper.make_node("Gather", ["w", "i"], ["y"], name="pick")]
    held = [helper.make_tensor("w", TensorProto.INT32, [1], [7]), helper.make_tensor("i", TensorProto.INT64, [1], [0])]
    model = helper.make_model(
        helper.make_graph(nodes, "g", [], ends[1:], held), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    graph = load(model)
    names = Names(graph)
    made = add_constant(graph, "table", values, names)
    kept = constant(made)
    assert kept is not None and not kept.flags.writeable and not kept.flags.owndata
    graph.nodes[0].inputs[0] = made
    graph.nodes[0].inputs[1] = add_constant(graph, "index", np.array([values.size - 1]), names)
    save(graph, tmp_path / "m.onnx")
    assert run(str(tmp_path / "m.onnx"), {})["y"].tolist() == [values.size - 1]


def test_spilled_values_are_the_same_values() -> None:
    for dtype in (np.float32, onnx.helper.tensor_dtype_to_np_dtype(TensorProto.INT4), np.bool_):
        values = (np.arange(15) % 2).astype(dtype).reshape(3, 5)
        back = spill(values)
        assert back.dtype == values.dtype
        np.testing.assert_array_equal(back, values)
        assert b"".join(array_chunks(back)) == b"".join(array_chunks(values))


@pytest.mark.skipif(not Path("/proc/self/smaps").is_file(), reason="resident pages are read from /proc")
def test_pages_of_every_scratch_file_are_released() -> None:
    """Arrays keep the map of their scratch file, also when later arrays are placed in another one."""
    files = ScratchFiles(1 << 20)
    arrays = [files.place(np.full(1 << 18, number, np.float32)).load() for number in range(3)]

    def resident() -> int:
        """Resident kilobytes of the arrays' maps."""
        starts = [array.__array_interface__["data"][0] for array in arrays]
        found, inside = 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            first, _, rest = line.partition(" ")
            if re.fullmatch("[0-9a-f]+-[0-9a-f]+", first):
                begin, end = (int(edge, 16) for edge in first.split("-"))
                inside = any(begin <= start < end for start in starts)
            elif inside and first == "Rss:":
                found += int(rest.split()[0])
        return found

    assert [float(array.sum()) for array in arrays] == [0.0, float(1 << 18), float(2 << 18)]
    assert resident() >= 3 * 1024
    release_pages()
    assert resident() == 0
    assert [float(array[-1]) for array in arrays] == [0.0, 1.0, 2.0]
