"""The skeleton of a file and its large tensors, taken apart and put together without parsing."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto, TensorProto, helper, numpy_helper

from sbonnx.errors import ModelError
from sbonnx.graph import load, to_proto
from sbonnx.graph.protos import tensor_protos
from sbonnx.graph.storage import protobuf_payloads


def put_together(data: bytes, skeleton: bytes, spans: list[protobuf_payloads.Span]) -> bytes:
    pieces = protobuf_payloads.attach(skeleton, [span.length for span in spans])
    return b"".join(
        piece.content if piece.payload is None else data[spans[piece.payload].offset :][: spans[piece.payload].length]
        for piece in pieces
    )


def tensors(count: int, size: int) -> list[TensorProto]:
    rng = np.random.default_rng(count * 1000 + size)
    made = [numpy_helper.from_array(rng.standard_normal(size).astype(np.float32), f"w{n}") for n in range(count)]
    for tensor in made[::2]:
        tensor.doc_string = "after the data"
    return made


def nested(sizes: list[int], depth: int) -> ModelProto:
    """Tensors as initializers, in Constant nodes, in branches of branches and in functions."""
    body = helper.make_graph(
        [helper.make_node("Constant", [], [f"c{n}"], value=tensor) for n, tensor in enumerate(tensors(1, sizes[0]))],
        "inner",
        [],
        [],
        tensors(2, sizes[1]),
    )
    for level in range(depth):
        node = helper.make_node("If", ["c"], ["y"], name=f"if{level}", then_branch=body, else_branch=body)
        body = helper.make_graph([node], f"level{level}", [], [], tensors(1, sizes[2]), doc_string="d" * 2000)
    model = helper.make_model(body, opset_imports=[helper.make_opsetid("", 17)])
    constant = helper.make_node("Constant", [], ["o"], value=tensors(1, sizes[3])[0])
    model.functions.append(helper.make_function("my", "f", [], ["o"], [constant], [helper.make_opsetid("", 17)]))
    return model


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from([0, 1, 30, 33, 300, 5000]), min_size=4, max_size=4),
    st.integers(0, 3),
    st.sampled_from([0, 128]),
)
def test_apart_and_together_is_the_same_file(sizes: list[int], depth: int, largest: int) -> None:
    data = nested(sizes, depth).SerializeToString(deterministic=True)
    skeleton, spans = protobuf_payloads.detach(data, largest=largest)
    assert put_together(data, skeleton, spans) == data
    small = ModelProto.FromString(skeleton)
    for tensor, _ in tensor_protos(small):
        assert len(tensor.raw_data) <= largest
        if tensor.data_location == TensorProto.EXTERNAL:
            span = spans[int(tensor.external_data[0].value)]
            assert span.length == 4 * tensor.dims[0] > largest


def test_float_data_is_raw_data_by_another_name() -> None:
    """Packed floats are the same bytes; split in two parts they are not taken out."""
    values = np.arange(500, dtype=np.float32)
    whole = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[500], float_data=values.tolist())
    model = helper.make_model(helper.make_graph([], "g", [], [], [whole]))
    data = model.SerializeToString()
    skeleton, spans = protobuf_payloads.detach(data, largest=100)
    assert [data[span.offset : span.offset + span.length] for span in spans] == [values.tobytes()]
    assert (
        numpy_helper.to_array(ModelProto.FromString(put_together(data, skeleton, spans)).graph.initializer[0]).tolist()
        == values.tolist()
    )
    halves = [TensorProto(float_data=part.tolist()).SerializeToString() for part in np.split(values, 2)]
    head = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[500]).SerializeToString()
    tensor = head + b"".join(halves)
    graph = b"\x2a" + protobuf_payloads.encode_varint(len(tensor)) + tensor
    split = b"\x3a" + protobuf_payloads.encode_varint(len(graph)) + graph
    assert protobuf_payloads.detach(split, largest=100) == (split, [])
    assert ModelProto.FromString(split).graph.initializer[0].float_data[:] == values.tolist()


def test_a_marker_in_a_name_is_only_a_name() -> None:
    source = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[2] x) => (float[2] y) { y = Add(x, w) }'
    )
    tensor = numpy_helper.from_array(np.ones(2, np.float32), protobuf_payloads.REFERENCE)
    source.graph.initializer.append(tensor)
    source.graph.node[0].input[1] = protobuf_payloads.REFERENCE
    source.graph.node[0].doc_string = protobuf_payloads.REFERENCE
    written = to_proto(load(source)).graph
    assert written.initializer[0].name == written.node[0].doc_string == protobuf_payloads.REFERENCE
    assert numpy_helper.to_array(written.initializer[0]).tolist() == [1, 1]


@pytest.mark.parametrize(
    "data", [b"\xff" * 12, b"\x07", b"\x3a\x05abc", b"\x08", b"\x02\x00", b"\x0d\x01", b"\x3a" + b"\xff" * 10]
)
def test_bytes_that_are_no_message(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"cut off|does not exist|longer"):
        protobuf_payloads.detach(data, largest=0)


def damaged() -> list[bytes]:
    """A good file with one to four bytes changed, lost or put in, 400 times over."""
    good = nested([1, 300, 30, 5], 2)
    good.graph.input.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
    data = good.SerializeToString()
    rng = np.random.default_rng(0)
    made = []
    for _ in range(400):
        copied = bytearray(data)
        for _ in range(rng.integers(1, 5)):
            at = int(rng.integers(len(copied)))
            kind = rng.integers(3)
            if kind == 0:
                copied[at] = int(rng.integers(256))
            elif kind == 1:
                del copied[at : at + int(rng.integers(1, 8))]
            else:
                copied[at:at] = rng.bytes(int(rng.integers(1, 6)))
        made.append(bytes(copied))
    return made


@pytest.mark.slow
def test_damaged_files_are_refused_or_read_but_never_crash(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("damaged") / "m.onnx"
    refused = 0
    for content in damaged():
        path.write_bytes(content)
        try:
            to_proto(load(path))
        except ModelError as error:
            refused += 1
            assert "\n" not in str(error) and str(path) in str(error)
    assert refused > 100
