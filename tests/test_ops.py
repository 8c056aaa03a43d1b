"""The table of op knowledge: names against the ONNX schemas, claims against onnxruntime."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper, parser
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

from sbonnx import ops

PACKAGE = Path(ops.__file__).resolve().parent
"""Of the checkout, where patterns and calib are links, or installed."""

SCHEMAS = onnx.defs.get_all_schemas_with_history()
STANDARD = frozenset(schema.name for schema in SCHEMAS if schema.domain in ops.STANDARD_DOMAINS)
CONTRIBUTED = frozenset(schema.name for schema in get_all_operator_schema())
"""Operators that onnxruntime knows, its own included."""

RANDOM = np.random.default_rng(0)

SETS = {name: value for name, value in vars(ops).items() if name.isupper() and isinstance(value, frozenset | dict)}
OP_SETS = sorted(SETS.keys() - {"STANDARD_DOMAINS", "RUNTIME_OPS", "INTEGER_PRODUCTS", "EXPERTS"})


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The outputs in onnxruntime, nothing optimised."""
    model.ir_version = 10
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [np.asarray(output) for output in session.run(None, feeds)]


def parsed(text: str, **constants: np.ndarray) -> onnx.ModelProto:
    """A model from text; `constants` become initializers."""
    graph = parser.parse_graph(text)
    graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])


@pytest.mark.parametrize("name", OP_SETS)
def test_every_op_exists(name: str) -> None:
    assert SETS[name], "an empty set knows nothing"
    assert not sorted(set(SETS[name]) - STANDARD - (CONTRIBUTED if name == "WEBGPU" else frozenset()))


LINEAR_MODELS = {
    "Conv": "g (float[1,2,5,5] x, float[3,2,3,3] w) => (float[1,3,3,3] y) { y = Conv(x, w) }",
    "ConvTranspose": "g (float[1,2,5,5] x, float[2,3,3,3] w) => (float[1,3,7,7] y) { y = ConvTranspose(x, w) }",
    "Gemm": "g (float[4,2] x, float[2,3] w) => (float[4,3] y) { y = Gemm(x, w) }",
    "MatMul": "g (float[4,2] x, float[2,3] w) => (float[4,3] y) { y = MatMul(x, w) }",
}
"""One of each, with three output channels on axis 1 of the output."""


@pytest.mark.parametrize("op", ops.LINEAR)
def test_linear_inputs_have_the_schemas_names(op: str) -> None:
    inputs = [value.name for value in onnx.defs.get_schema(op).inputs]
    linear = ops.LINEAR[op]
    assert inputs[linear.weight] == ("W" if op.startswith("Conv") else "B")
    if linear.bias is None:
        assert len(inputs) == 2
    else:
        assert inputs[linear.bias] == ("B" if op.startswith("Conv") else "C")


INT64 = np.int64
MOVES = {
    "Reshape": ("Reshape(x, c)", np.array([2, 32], INT64)),
    "Transpose": ("Transpose <perm = [0, 2, 1, 3]> (x)", None),
    "Squeeze": ("Squeeze(x)", None),
    "Unsqueeze": ("Unsqueeze(x, c)", np.array([0], INT64)),
    "Flatten": ("Flatten(x)", None),
    "Slice": ("Slice(x, c, d)", np.array([0, 1, 0, 1], INT64)),
    "Gather": ("Gather <axis = 1> (x, c)", np.array([3, 0, 0], INT64)),
    "GatherElements": ("GatherElements <axis = 3> (x, c)", RANDOM.integers(0, 4, (1, 4, 4, 4))),
    "GatherND": ("GatherND(x, c)", np.array([[0, 1], [0, 3]], INT64)),
    "Split": ("Split <axis = 1> (x)", None),
    "Expand": ("Expand(x, c)", np.array([3, 4, 4, 4], INT64)),
    "Tile": ("Tile(x, c)", np.array([1, 2, 1, 3], INT64)),
    "DepthToSpace": ("DepthToSpace <blocksize = 2> (x)", None),
    "SpaceToDepth": ("SpaceToDepth <blocksize = 2> (x)", None),
    "Identity": ("Identity(x)", None),
    "MaxPool": ("MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x)", None),
    "GlobalMaxPool": ("GlobalMaxPool(x)", None),
}


@pytest.mark.parametrize("op", sorted(ops.MOVES_DATA | ops.PICKS_MAX))
def test_output_values_are_input_values(op: str) -> None:
    """What shares its input's scale holds its input's values (negative ones: padding adds no zero)."""
    call, constant = MOVES[op]
    constants = {} if constant is None else {"c": constant, "d": np.array([1, 4, 3, 4], INT64)}
    model = parsed(f"g (float[1,4,4,4] x) => (float y) {{ y = {call} }}", **constants)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    x = -1 - RANDOM.random((1, 4, 4, 4)).astype(np.float32)
    (y,) = run(model, {"x": x})
    assert y.size and np.isin(y, x).all()


def test_pooling_commutes_with_rounding() -> None:
    """What PICKS_MAX is for: the max of codes is the code of the max."""
    model = parsed("g (float[1,4,4,4] x) => (float[1,4,2,2] y) { y = MaxPool <kernel_shape=[2,2], strides=[2,2]> (x) }")
    x = RANDOM.standard_normal((1, 4, 4, 4)).astype(np.float32)
    (of_codes,) = run(model, {"x": np.rint(x * 7)})
    (of_values,) = run(model, {"x": x})
    np.testing.assert_array_equal(of_codes, np.rint(of_values * 7))


def test_sets_do_not_contradict_each_other() -> None:
    computes = ops.LINEAR.keys() | ops.POOLS | ops.REDUCES | ops.ACTIVATIONS | ops.NORMS | ops.SOFTMAX
    assert not (ops.MOVES_DATA | ops.PICKS_MAX) & computes
    assert ops.RECTIFIERS <= ops.ACTIVATIONS
    assert ops.QDQ == {"QuantizeLinear", "DequantizeLinear"}
    assert ops.CONTROL_FLOW == {
        schema.name
        for schema in SCHEMAS
        if schema.domain == "" and any(a.type == onnx.defs.OpSchema.AttrType.GRAPH for a in schema.attributes.values())
    } - {"SequenceMap"}  # a function: it is inlined to a Loop before anything looks


def test_integer_ops_make_or_read_integers() -> None:
    for op in ops.INTEGER_OPS:
        schema = onnx.defs.get_schema(op)
        types = {kind for constraint in schema.type_constraints for kind in constraint.allowed_type_strs}
        assert {"tensor(int8)", "tensor(uint8)"} & types, op


def source_files() -> list[Path]:
    """Every source file but the table itself."""
    folders = (PACKAGE, *((PACKAGE / name).resolve() for name in ("patterns", "calib")))
    found = {path.resolve() for folder in folders for path in folder.rglob("*.py")}
    return sorted(path for path in found if path.name != "ops.py")


SOURCES = source_files()


def literals(node: ast.expr) -> list[str]:
    """The strings of a literal, a tuple, list or set of them, or a `frozenset` of one of those."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return [text for element in node.elts for text in literals(element)]
    return []


def op_sets(tree: ast.AST) -> Iterator[tuple[int, set[str]]]:
    """Line and strings of every literal that looks like a set of op types: most of its strings are."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            named = {text for element in node.elts if isinstance(element, ast.Constant) for text in literals(element)}
            if 2 * len(named & STANDARD) > len(named):
                yield node.lineno, named


def quoted_ops(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of what ``.op`` is compared with, what ``Op(...)`` matches, and what sets of ops hold."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute) and node.left.attr == "op":
            for side in node.comparators:
                yield from ((node.lineno, text) for text in literals(side))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Op" and node.args:
            yield from ((node.lineno, text) for text in literals(node.args[0]))
    for line, names in op_sets(tree):
        yield from ((line, name) for name in sorted(names) if not name.startswith("block:"))


CONTRIB = frozenset({"FusedMatMul", "FastGelu", "BiasGelu", "QuickGelu", "SkipLayerNormalization"})
"""Ops of onnxruntime that may be named: there are no schemas for them here."""


@cache
def named_in(path: Path) -> tuple[list[tuple[int, str]], list[tuple[int, set[str]]]]:
    """Quoted op types, and literals that look like sets of op types, of a source file."""
    tree = ast.parse(path.read_text())
    return list(quoted_ops(tree)), list(op_sets(tree))


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(PACKAGE.parent).as_posix()}:{line}"


@pytest.mark.slow
def test_quoted_op_types_exist() -> None:
    """A misspelt op type never matches, and nothing says so."""
    assert len(SOURCES) > 400
    known = STANDARD | CONTRIB
    wrong = [f"{place(path, line)}: '{op}'" for path in SOURCES for line, op in named_in(path)[0] if op not in known]
    assert not wrong, "no such ONNX op:\n" + "\n".join(wrong)


def test_lists_of_op_types_stand_in_one_table() -> None:
    """Three op types in one literal are knowledge: they belong into `ops.py`, under a name.

    A backend says which ops its runtime accepts, a pattern which ops it matches, the tuner which kernels it times:
    knowledge of their own.
    """
    asked = [path for path in SOURCES if not {"backends", "patterns", "tuning"} & set(path.parts)]
    wrong = [
        f"{place(path, line)}: {sorted(ops)}" for path in asked for line, ops in named_in(path)[1] if len(ops) >= 3
    ]
    assert not wrong, "\n".join(wrong)


def test_no_set_of_the_table_is_written_again() -> None:
    """Two copies of one set drift apart: a third linear op would be added to one of them."""
    named = {frozenset(SETS[name]): name for name in OP_SETS if len(SETS[name]) >= 3}
    wrong = [
        f"{place(path, line)}: that is ops.{named[frozenset(ops)]}"
        for path in SOURCES
        if "backends" not in path.parts
        for line, ops in named_in(path)[1]
        if frozenset(ops) in named
    ]
    assert not wrong, "\n".join(wrong)
