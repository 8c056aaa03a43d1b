"""What the tests of half precision share: a float model converted, and looked at with tools that are not ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import onnx
from onnx import TensorProto

import sbonnx
from sbonnx.report import Report
from sbonnx.spec import Array

NAMES = {TensorProto.FLOAT: "fp32", TensorProto.FLOAT16: "fp16", TensorProto.BFLOAT16: "bf16"}


def convert(
    proto: onnx.ModelProto, feeds: list[dict[str, Array]], kind: Literal["fp16", "bf16"] = "fp16", **wishes: Any
) -> Report:
    """A float model in the narrower type, nothing quantized, proved on `feeds`."""
    wishes = {"backend": "virtual", "bits": "w0a0", **wishes}
    report = sbonnx.quantize(proto, feeds, high_precision=kind, **wishes)
    assert report.quantized is not None
    onnx.checker.check_model(report.quantized, full_check=True)
    return report


def made(report: Report) -> onnx.ModelProto:
    """The model of a report."""
    assert report.quantized is not None
    return report.quantized


def graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph and every body in it."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from graphs(attribute.g)


def types(proto: onnx.ModelProto) -> dict[str, str]:
    """Float type of every tensor by name, as onnx infers it with nothing but inputs and constants to go by."""
    bare = onnx.ModelProto()
    bare.CopyFrom(proto)
    for graph in graphs(bare.graph):
        del graph.value_info[:]
    inferred = onnx.shape_inference.infer_shapes(bare, check_type=True, strict_mode=True)
    found: dict[str, str] = {}
    for graph in graphs(inferred.graph):
        for value in [*graph.input, *graph.value_info, *graph.output]:
            found[value.name] = NAMES.get(value.type.tensor_type.elem_type, "other")
        found.update({tensor.name: NAMES.get(tensor.data_type, "other") for tensor in graph.initializer})
    return found


def ops_by_type(proto: onnx.ModelProto) -> dict[str, set[str]]:
    """Float types of what each kind of op gives."""
    kinds = types(proto)
    found: dict[str, set[str]] = {}
    for graph in graphs(proto.graph):
        for node in graph.node:
            found.setdefault(node.op_type, set()).update(kinds.get(name, "other") for name in node.output)
    return found


def casts(proto: onnx.ModelProto) -> Counter[str]:
    """Casts by "source -> target"; the test of the types that a Cast reads is onnx's."""
    kinds = types(proto)
    pairs = [(kinds[node.input[0]], kinds[node.output[0]]) for g in graphs(proto.graph) for node in g.node
             if node.op_type == "Cast"]  # fmt: skip
    return Counter(f"{source} -> {target}" for source, target in pairs)


def assert_few_casts(proto: onnx.ModelProto) -> None:
    """No tensor is cast twice to one type, and none from one float type to another and on."""
    kinds = types(proto)
    for graph in graphs(proto.graph):
        nodes = [node for node in graph.node if node.op_type == "Cast"]
        seen = Counter((node.input[0], node.attribute[0].i) for node in nodes)
        assert max(seen.values(), default=1) == 1, seen
        results = {node.output[0] for node in nodes if "other" not in (kinds[node.input[0]], kinds[node.output[0]])}
        assert not [node.name for node in nodes if node.input[0] in results]


def whys(report: Report) -> list[str]:
    """Why what stays float32 stays, one line each."""
    return [f"{one.where}: {one.why}" for one in report.refusals if one.what.startswith("convert to")]


def normal(*shape: int, scale: float = 1.0, seed: int = 0, count: int = 4) -> list[dict[str, Array]]:
    """Feeds of input x."""
    rng = np.random.default_rng(seed)
    return [{"x": (scale * rng.standard_normal(shape)).astype(np.float32)} for _ in range(count)]
