"""Cases that once ended badly, one for each defect, with the exit code that is right."""

from __future__ import annotations

import base64
import io
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.bad_models import good
from tests.fuzz import seeds
from tests.fuzz.datafiles import good_npz
from tests.fuzz.harness import Case
from tests.fuzz.parts import MODEL, model_case

F: Final = TensorProto.FLOAT


@dataclass(frozen=True)
class Known:
    """How to make a case, its exit code, and words that the line of a refusal must have."""

    name: str
    case: Callable[[], Case]
    code: int
    words: tuple[str, ...] = ()


def graph_model(
    nodes: list[onnx.NodeProto],
    held: Mapping[str, Any] | None = None,
    *,
    shape: list[Any] | None = None,
    opset: int = 17,
    ir: int = 8,
    name: str = "g",
    output: onnx.ValueInfoProto | None = None,
) -> onnx.ModelProto:
    """A model from `x` (float) to `y` that nothing has checked."""
    graph = helper.make_graph(
        nodes,
        name,
        [helper.make_tensor_value_info("x", F, shape or ["N", 4])],
        [output or helper.make_tensor_value_info("y", F, None)],
        [numpy_helper.from_array(np.asarray(value), key) for key, value in (held or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)


def node(op: str, inputs: str, outputs: str = "y", **attributes: Any) -> onnx.NodeProto:
    """A node called as its operator."""
    return helper.make_node(op, inputs.split(), outputs.split(), name=op.lower(), **attributes)


WEIGHT: Final = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)


def linear(*more: onnx.NodeProto, **held: Any) -> onnx.ModelProto:
    """MatMul from `x` to `h`, then `more`."""
    return graph_model([node("MatMul", "x weight", "h"), *more], {"weight": WEIGHT, **held})


def wrong_attribute() -> onnx.ModelProto:
    """A Squeeze below opset 13 whose `axes` is a text."""
    return graph_model([node("Squeeze", "x", axes="text")], opset=11)


def least_by_minus_one(op: str) -> onnx.ModelProto:
    """Division of the least integer by -1, of constants."""
    held = {"a": np.array([np.iinfo(np.int64).min]), "b": np.array([-1])}
    return linear(node(op, "a b", "d"), node("Cast", "d", "c", to=F), node("Add", "h c"), **held)


def by_zero() -> onnx.ModelProto:
    held = {"a": np.array([1]), "b": np.array([0])}
    return linear(node("Div", "a b", "d"), node("Cast", "d", "c", to=F), node("Add", "h c"), **held)


def ranges(limit: float) -> onnx.ModelProto:
    held = {"a": np.float32(0), "b": np.float32(limit), "c": np.float32(1)}
    return linear(node("Range", "a b c", "d"), node("ReduceSum", "d", "e", keepdims=0), node("Add", "h e"), **held)


def branches(depth: int = 1, *, outputs: int = 1, graph: bool = True) -> onnx.ModelProto:
    """If on a constant, nested `depth` times; its branches have `outputs` outputs."""
    inner = [node("Relu", "h", "a")]
    large = numpy_helper.from_array(np.zeros(400, np.float32), "large")
    for level in range(depth):
        body = helper.make_graph(
            inner, f"b{level}", [], [helper.make_tensor_value_info("a", F, None)][:outputs], [large]
        )
        inner = [helper.make_node("If", ["flag"], ["a"], name=f"if{level}", then_branch=body, else_branch=body)]
        if not graph:
            del inner[0].attribute[:]
            inner[0].attribute.extend(
                [helper.make_attribute("then_branch", 1), helper.make_attribute("else_branch", body)]
            )
    return linear(*inner, node("Add", "h a"), flag=np.array(True))


def nested(depth: int) -> onnx.ModelProto:
    """Ifs within ifs, built as bytes from inside out: a message of that depth cannot be copied around."""
    proto = linear(node("Relu", "h", "a"), node("Add", "h a"), flag=np.array(True))
    inner: onnx.NodeProto = node("Relu", "h", "a")
    for level in range(depth):
        body = onnx.GraphProto(name=f"b{level}")
        body.node.add().CopyFrom(inner)
        body.output.add().name = "a"
        inner = onnx.NodeProto(op_type="If", name=f"if{level}", input=["flag"], output=["a"])
        for key in ("then_branch", "else_branch")[: 2 if level == 0 else 1]:
            inner.attribute.add(name=key, type=onnx.AttributeProto.GRAPH).g.CopyFrom(body)
    proto.graph.node[1].CopyFrom(inner)
    return proto


def functions(levels: int) -> onnx.ModelProto:
    """Local functions that each call the next one twice: 2**levels nodes once inlined."""
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    made = []
    for level in range(levels):
        last = level == levels - 1
        call = [
            helper.make_node("Relu" if last else f"F{level + 1}", [a], [b], domain="" if last else "local")
            for a, b in (("a", "b"), ("b", "c"))
        ]
        made.append(helper.make_function("local", f"F{level}", ["a"], ["c"], call, opsets))
    proto = linear(helper.make_node("F0", ["h"], ["y"], domain="local", name="call"))
    proto.opset_import.append(helper.make_opsetid("local", 1))
    proto.functions.extend(made)
    return proto


def pad(**attributes: Any) -> onnx.ModelProto:
    return graph_model(
        [node("Pad", "x", "p", **attributes), node("Conv", "p w")],
        {"w": WEIGHT.reshape(4, 4, 1, 1)},
        shape=[1, 4, 4, 4],
        opset=9,
        ir=4,
    )


def listed_twice() -> onnx.ModelProto:
    proto = linear(node("Relu", "h"))
    proto.graph.output.append(proto.graph.output[0])
    return proto


def constant_without_output() -> onnx.ModelProto:
    return linear(helper.make_node("Constant", [], [], name="c", value_float=1.0), node("Relu", "h"))


def changed(change: Callable[[onnx.ModelProto], object], proto: onnx.ModelProto | None = None) -> onnx.ModelProto:
    """`proto`, or the good model, after `change`."""
    proto = proto or good()
    change(proto)
    return proto


def as_text(proto: onnx.ModelProto) -> None:
    proto.graph.initializer[0].data_type = TensorProto.STRING


def many_dimensions(proto: onnx.ModelProto) -> None:
    proto.graph.initializer[0].dims.extend([1] * 65)


def located(location: str) -> onnx.ModelProto:
    proto = good()
    weight = proto.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value=location)
    return proto


def minus_one(proto: onnx.ModelProto) -> None:
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1


def nameless(proto: onnx.ModelProto) -> None:
    proto.graph.ClearField("name")


def seven() -> onnx.ModelProto:
    """Opset 7, IR 3, where initializers are listed as inputs."""
    proto = graph_model([node("MatMul", "x weight", "h"), node("Relu", "h")], {"weight": WEIGHT}, opset=7, ir=3)
    proto.graph.input.append(helper.make_tensor_value_info("weight", F, [4, 4]))
    return proto


def seven_unlisted() -> onnx.ModelProto:
    proto = seven()
    del proto.graph.input[1]
    return proto


def unknown_output() -> onnx.ModelProto:
    """A Reshape to what an input says: nobody can infer its shape, and the output declares none."""
    proto = graph_model([node("MatMul", "x weight", "h"), node("Reshape", "h shape")], {"weight": WEIGHT})
    proto.graph.input.append(helper.make_tensor_value_info("shape", TensorProto.INT64, [2]))
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    return proto


def empty_size() -> onnx.ModelProto:
    proto = graph_model(
        [node("MatMul", "x weight", "h"), node("Concat", "h none", axis=1)],
        {"weight": WEIGHT, "none": np.zeros((4, 0), np.float32)},
        shape=[4, 4],
    )
    return proto


def long_name(proto: onnx.ModelProto) -> None:
    proto.graph.node[1].op_type = "X" * 1_000_000


def escape(proto: onnx.ModelProto) -> None:
    proto.graph.node[1].op_type = "Relux"
    proto.graph.node[1].name = "\x1b[2J\x1b[31m\x00\u202e"


def pattern() -> onnx.ModelProto:
    """A pattern that the native library complains about on stderr."""
    proto = linear(node("Relu", "h"), node("RegexFullMatch", "t", "z", pattern="("), t=np.array(["a"], dtype=object))
    proto.opset_import[0].version = 20
    proto.graph.output.append(helper.make_tensor_value_info("z", TensorProto.BOOL, None))
    return proto


def quantize(files: Mapping[str, bytes], data: str = "d.npz", *more: str, **keywords: Any) -> Case:
    """A quantize of the good model over these files."""
    argv = ("quantize", MODEL, "--data", data, "-o", "out/q.onnx", *more)
    return Case({MODEL: seeds.seed("plain"), **files}, argv, **keywords)


def zipped(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return file.getvalue()


def flagged(method: int | None = None, flag: int | None = None) -> bytes:
    """The good data with another compression method or flag written into its zip headers."""
    data = bytearray(good_npz())
    for signature, flags, methods in ((b"PK\x03\x04", 6, 8), (b"PK\x01\x02", 8, 10)):
        at = data.index(signature)
        if flag is not None:
            struct.pack_into("<H", data, at + flags, flag)
        if method is not None:
            struct.pack_into("<H", data, at + methods, method)
    return bytes(data)


def zip_bomb() -> bytes:
    """1.6 GB of zeros in few bytes, as an array of a wrong shape."""
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (400000000,), }"
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    file = io.BytesIO()
    archive = zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1)
    with archive, archive.open("x.npy", "w") as member:
        member.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)
        for _ in range(160):
            member.write(bytes(10_000_000))
    return file.getvalue()


def inner(content: bytes) -> bytes:
    """Polygraphy's JSON around an `.npz`."""
    text = base64.b64encode(content).decode()
    return f'{{"lst": [{{"x": {{"array": "{text}", "polygraphy_class": "Array"}}}}]}}'.encode()


def recipe(text: str) -> Case:
    return Case({MODEL: seeds.seed("plain"), "r.yaml": text.encode()}, ("recipe", "r.yaml"))


REFUSED: Final[dict[str, tuple[Callable[[], onnx.ModelProto], str]]] = {
    "attribute of a wrong type": (wrong_attribute, "axes"),
    "functions that grow without bound": (lambda: functions(25), "F"),
    "branches without outputs": (lambda: branches(outputs=0), "if0"),
    "branch that is not a graph": (lambda: branches(graph=False), "then_branch"),
    "pads as text": (lambda: pad(pads="text"), "pad"),
    "numbers declared as text": (lambda: changed(as_text), "'w'"),
    "69 dimensions": (lambda: changed(many_dimensions), "'w'"),
    "location with NUL": (lambda: located("a\0b"), "'w'"),
    "location of 5,000 characters": (lambda: located("n" * 5000), "'w'"),
    "location of a link to itself": (lambda: located("loop.bin"), "'w'"),
    "constant without an output": (constant_without_output, "'c'"),
    "operator of a million characters": (lambda: changed(long_name), "XXX"),
    "control characters": (lambda: changed(escape), "Relux"),
    "output listed twice": (listed_twice, "'y'"),
}
"""Models that no verb can use, and a word that the line must have."""

ACCEPTED: Final[dict[str, Callable[[], onnx.ModelProto]]] = {
    "least integer by -1": lambda: least_by_minus_one("Div"),
    "least integer modulo -1": lambda: least_by_minus_one("Mod"),
    "division by zero": by_zero,
    "range to infinity": lambda: ranges(float("inf")),
    "range to NaN": lambda: ranges(float("nan")),
    "size of -1": lambda: changed(minus_one),
    "graph without a name": lambda: changed(nameless),
    "opset 7": seven,
    "opset 7, initializers unlisted": seven_unlisted,
    "output of unknown shape": unknown_output,
    "size of 0": empty_size,
}
"""Models that onnxruntime runs, or that only fail as they run: simplify must give the same function."""


def torn() -> bytes:
    """The good data with three bytes of an array changed."""
    npz = good_npz()
    return npz[:400] + bytes(byte ^ 0x55 for byte in npz[400:403]) + npz[403:]


DATA: Final[dict[str, Callable[[], Case]]] = {
    "fifo": lambda: quantize({}, fifos=("d.npz",)),
    "link to itself": lambda: quantize({}, "d.json", links={"d.json": "d.json"}),
    "encrypted member": lambda: quantize({"d.npz": flagged(flag=1)}),
    "unknown compression": lambda: quantize({"d.npz": flagged(method=93)}),
    "deep json": lambda: quantize({"d.json": b"[" * 100_000}, "d.json"),
    "json around an empty npz": lambda: quantize({"d.json": inner(zipped())}, "d.json"),
    "json around half an npz": lambda: quantize({"d.json": inner(good_npz()[:500])}, "d.json"),
    "json around a bad checksum": lambda: quantize({"d.json": inner(torn())}, "d.json"),
    "header that is no literal": lambda: quantize({"d.npz": zipped(x=b"\x93NUMPY\x01\x00\x04\x00{{{\n")}),
    "zip bomb": lambda: quantize({"d.npz": zip_bomb()}),
    "digits that are none": lambda: quantize({"d/x.npy": b"", "d/²1.npy": b""}, "d"),
}
"""Data that is refused."""


def preview(
    text: str,
    files: Mapping[str, bytes] | None = None,
    *,
    links: Mapping[str, str] | None = None,
    fifos: tuple[str, ...] = (),
) -> Case:
    """A preview of a job file beside a good model, good data and a metric."""
    metric = b"def score(path):\n    return {'s': 1.0}\n"
    beside = {MODEL: seeds.seed("plain"), "d.npz": good_npz(), "metric.py": metric, **(files or {})}
    return Case({**beside, "j.yaml": text.encode()}, ("batch", "j.yaml", "--dry-run"), links=links or {}, fifos=fifos)


def job(*, model: str = MODEL, more: str = "") -> str:
    """A job file of one job."""
    return f"output: out\njobs:\n  - {{model: {model}, data: d.npz, accept: {{metric: 'metric.py:score'}}{more}}}\n"


def simplify(target: str, **keywords: Any) -> Case:
    """A simplify of the good model to `target`."""
    return Case({MODEL: seeds.seed("plain")}, ("simplify", MODEL, "-o", target, "--force"), **keywords)


def kernel_costs() -> Case:
    files = {
        MODEL: seeds.seed("plain"),
        "k.json": b"[" * 100_000,
        "r.yaml": b"BACKEND: onnxruntime\nKERNEL_COSTS: k.json\n",
    }
    return Case(files, ("plan", MODEL, "--recipe", "r.yaml"))


def circle() -> Case:
    """Links in a tree of models that lead back to it."""
    links = {f"models/{name}": "." for name in ("one", "two", "three")}
    return preview(job(model="models/**/x*.onnx"), {"models/a/x1.onnx": seeds.seed("plain")}, links=links)


OTHERS: Final[tuple[Known, ...]] = (
    Known("number of 90,000 digits", lambda: recipe("SAMPLES: " + "9" * 90_000), 2, ("SAMPLES",)),
    Known("deep kernel costs", kernel_costs, 2, ("k.json",)),
    Known("output of 300 characters", lambda: simplify(f"out/{'n' * 300}.onnx"), 2),
    Known("output is a fifo", lambda: simplify("pipe", fifos=("pipe",)), 2, ("pipe",)),
    Known("output is a link to a fifo", lambda: simplify("p", fifos=("pipe",), links={"p": "pipe"}), 2, ("p",)),
    Known("links in a circle", circle, 0),
    Known("model is a fifo", lambda: preview(job(model="pipe.onnx"), fifos=("pipe.onnx",)), 2, ("pipe.onnx",)),
    Known("output over the job file", lambda: preview(job(more=", output: ../j.yaml")), 2, ("j.yaml",)),
    Known("output over the metric", lambda: preview(job(more=", output: ../metric.py")), 2, ("metric.py",)),
    Known("output elsewhere", lambda: preview(job(more=", output: ../elsewhere/q.onnx")), 2, ("elsewhere",)),
    Known("pattern that the runtime dislikes", lambda: over(pattern(), "quantize"), 2),
    Known("Ifs within Ifs", lambda: over(nested(40), "simplify"), 0),
)
"""Recipes, job files and outputs."""


def over(proto: onnx.ModelProto, verb: str, **links: str) -> Case:
    """A verb over a model; `links` beside it."""
    case = model_case(proto.SerializeToString(), verb)
    return Case(case.files, case.argv, case.same, links=links)


def known() -> list[Known]:
    """All of them."""
    rows = [
        Known(
            f"{name}: {verb}",
            partial(lambda make, verb: over(make(), verb, **{"loop.bin": "loop.bin"}), make, verb),
            2,
            (word,),
        )
        for name, (make, word) in REFUSED.items()
        for verb in ("inspect", "simplify", "quantize")
    ]
    rows += [
        Known(f"{name}: simplify", partial(lambda make: over(make(), "simplify"), make), 0)
        for name, make in ACCEPTED.items()
    ]
    rows += [Known(name, make, 2, ("DataError",)) for name, make in DATA.items()]
    return [*rows, *OTHERS]
