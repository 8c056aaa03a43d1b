"""Names of torch modules in patterns: `layer1_0_conv1`, `layer1.*`, `fc`, as the ancestor's recipes have them."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from typing import Any

import onnx
import pytest

from sbonnx.assets import digits
from sbonnx.backends import backend_for
from sbonnx.errors import RecipeError
from sbonnx.pipeline import prepare
from sbonnx.recipe import load
from sbonnx.recipe.torch_modules import SCOPES, Modules, NodeInfo, module_path

VIRTUAL = backend_for("virtual", None)

RESNET = [
    ("/conv1/Conv", "Conv"),
    ("/relu/Relu", "Relu"),
    ("/layer1/layer1.0/conv1/Conv", "Conv"),
    ("/layer1/layer1.0/relu/Relu", "Relu"),
    ("/layer1/layer1.0/conv2/Conv", "Conv"),
    ("/layer1/layer1.0/downsample/downsample.0/Conv", "Conv"),
    ("/layer1/layer1.0/Add", "Add"),
    ("/layer1/layer1.0/relu/Relu_1", "Relu"),
    ("/layer1/layer1.1/conv1/Conv", "Conv"),
    ("/layer1/layer1.1/Add", "Add"),
    ("/norm/ReduceMean", "ReduceMean"),
    ("/norm/Sub", "Sub"),
    ("/blocks.0/attn/qkv/MatMul", "MatMul"),
    ("/blocks.0/attn/qkv/Add", "Add"),
    ("/blocks.0/attn/MatMul", "MatMul"),
    ("/blocks.0/attn/Softmax", "Softmax"),
    ("/Flatten", "Flatten"),
    ("/fc/Gemm", "Gemm"),
]
"""As the exporter on TorchScript names nodes; `relu` of a block is one module that is called twice."""


def dynamo(path: str, name: str) -> dict[str, str]:
    """Metadata of the exporter on torch.export."""
    parts = path.split(".") if path else []
    scopes = ["", *(".".join(parts[:length]) for length in range(1, len(parts) + 1)), name]
    return {SCOPES: repr(scopes)}


def infos(nodes: Sequence[tuple[str, str]] = RESNET, *, exporter: str = "torchscript") -> list[NodeInfo]:
    """The nodes by either exporter, or with numbers for names and the module in the name of the weight alone."""
    found = [NodeInfo(*node) for node in nodes]
    if exporter == "torchscript":
        return found
    paths = [module_path(node) or "" for node in found]
    if exporter == "dynamo":
        named = [f"node_{node.op.lower()}_{number}" for number, node in enumerate(found)]
        return [
            NodeInfo(name, node.op, dynamo(path, name[5:]))
            for name, node, path in zip(named, found, paths, strict=True)
        ]
    return [
        NodeInfo(f"{node.op}_{number}", node.op, {}, f"{path}.weight" if node.op in ("Conv", "Gemm") else "")
        for number, (node, path) in enumerate(zip(found, paths, strict=True))
    ]


MEANT: dict[str, list[int]] = {
    "conv1": [0],
    "layer1_0_conv1": [2],
    "layer1.0.conv1": [2],
    "layer1_0_downsample_0": [5],
    "layer1_*_conv1": [2, 8],
    "*conv1": [0, 2, 8],
    "layer1_0_relu": [3],
    "layer1_0_relu_1": [7],
    "layer1.0.relu": [3, 7],
    "add": [6],
    "add_1": [9],
    "norm": [10, 11],
    "blocks_0_attn_qkv": [12, 13],
    "matmul": [14],
    "softmax*": [15],
    "flatten": [16],
    "fc": [17],
    "layer1_0": [2, 3, 4, 5, 6, 7],
    "layer1.1": [8, 9],
}
"""Places of the nodes in `RESNET`, by pattern. A module with others inside stands for all that is in it."""


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
@pytest.mark.parametrize("pattern", MEANT)
def test_names_of_modules(pattern: str, exporter: str) -> None:
    nodes = infos(exporter=exporter)
    found = {name for layer in Modules(nodes).find(pattern) for name in layer.nodes}
    assert found == {nodes[place].name for place in MEANT[pattern]}


def test_settings_reach_the_nodes() -> None:
    specific = [{"layer1_0_conv1": ["QUANTIZER.BIT", 4], "fc": {"QUANTIZER.BIT": 6}}]
    wishes = {
        "BACKEND": "virtual",
        "W": {"SPECIFIC": specific},
        "EXCLUDE": ["conv1"],
        "SKIP_TRACE_MODULES": ["layer1.1"],
    }
    recipe, nothing = load(wishes).for_model(infos(), [])
    bits = {name: recipe.settings("w", node=name, op=op, tensor="t") for name, op in RESNET if op in ("Conv", "Gemm")}
    assert {name: found.bits if found.enabled else 0 for name, found in bits.items()} == {
        "/conv1/Conv": 0,
        "/layer1/layer1.0/conv1/Conv": 4,
        "/layer1/layer1.0/conv2/Conv": 8,
        "/layer1/layer1.0/downsample/downsample.0/Conv": 8,
        "/layer1/layer1.1/conv1/Conv": 0,
        "/fc/Gemm": 6,
    }
    assert not nothing and recipe == load(wishes), "the wishes are the same"


def test_skipped_modules_are_paths_first() -> None:
    """`layer1.*` is every module in layer1, with the functions that it calls; in SPECIFIC it is layers alone."""
    recipe, _ = load(
        {"SKIP_TRACE_MODULES": ["layer1.*"], "A": {"SPECIFIC": [{"blocks.*": ["QUANTIZER.BIT", 4]}]}}
    ).for_model(infos(), [])
    skipped = [name for name, op in RESNET if not recipe.settings("a", node=name, op=op, tensor="t").enabled]
    assert skipped == [name for name, _ in RESNET if name.startswith("/layer1")]
    narrow = [name for name, op in RESNET if recipe.settings("a", node=name, op=op, tensor="t").bits == 4]
    assert narrow == ["/blocks.0/attn/qkv/MatMul", "/blocks.0/attn/qkv/Add"]


def test_names_of_weights_where_nodes_have_numbers() -> None:
    nodes = infos(exporter="numbers")
    assert [layer.nodes for layer in Modules(nodes).find("layer1_0_conv2")] == [("Conv_4",)]
    assert [layer.nodes for layer in Modules(nodes).find("fc")] == [("Gemm_17",)]


def test_names_of_the_file_come_first() -> None:
    """A pattern that is the name of a node means that node alone."""
    nodes = [NodeInfo("fc", "Relu"), NodeInfo("/fc/Gemm", "Gemm")]
    recipe, _ = load({"EXCLUDE": ["fc"]}).for_model(nodes, [])
    assert not recipe.settings("w", node="fc", op="Relu", tensor="t").enabled
    assert recipe.settings("w", node="/fc/Gemm", op="Gemm", tensor="t").enabled
    tensorflow = [NodeInfo("model/conv/Conv2D", "Conv"), NodeInfo("Add__12", "Add")]
    with pytest.raises(RecipeError, match="matches no node"):
        load({"EXCLUDE": ["add"]}).for_model(tensorflow, [])


AMBIGUOUS: list[tuple[dict[str, Any], list[tuple[str, str]], str]] = [
    (
        {"EXCLUDE": ["a_b"]},
        [("/a/b/Conv", "Conv"), ("/a_b/Conv", "Conv")],
        "'EXCLUDE[0]' in the recipe is the name of 2 modules, got 'a_b'. "
        "Write the path with dots, or the name of a node: a.b, a_b",
    ),
    (
        {"W": {"SPECIFIC": [{"relu": ["QUANTIZER.BIT", 4]}]}},
        [("/relu/Relu", "Relu"), ("/net/conv/Conv", "Conv"), ("/net/Relu", "Relu")],
        "is the name of 2 modules. Write the path with dots, or the name of a node: relu, relu (a function)",
    ),
]


@pytest.mark.parametrize(("wishes", "nodes", "said"), AMBIGUOUS)
def test_a_name_of_two_modules_is_an_error(wishes: dict[str, Any], nodes: list[tuple[str, str]], said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(wishes).for_model(infos(nodes), [])
    assert said in str(caught.value)


def test_a_skipped_module_may_have_left_no_node() -> None:
    """DropPath and Dropout do nothing at inference; any other pattern without a node is an error."""
    _, nothing = load({"SKIP_TRACE_MODULES": ["blocks.*.drop_path"]}).for_model(infos(), [])
    assert list(nothing) == ["blocks.*.drop_path"] and "Nearest: '/blocks.0/" in nothing["blocks.*.drop_path"]
    for pattern in ("/blocks.1/*", "op:Dropout", "tensor:blocks"):
        with pytest.raises(RecipeError, match="matches no"):
            load({"SKIP_TRACE_MODULES": [pattern]}).for_model(infos(), [])


@pytest.mark.parametrize("text", ["[", "['a'", "{}", "[1, 2]" * 9_000, "[" * 9_000, "__import__('os')", "[open]"])
def test_metadata_that_is_something_else(text: str) -> None:
    assert module_path(NodeInfo("node_conv2d_3", "Conv", {SCOPES: text})) is None


def test_a_file_of_the_exporter_on_torch_export() -> None:
    """The bundled model, whose node names are numbered and whose metadata was left out."""
    prepared = prepare(digits().model, load({"EXCLUDE": ["stem_0"], "SKIP_TRACE_MODULES": ["residual"]}), VIRTUAL)
    left = {"node_conv2d", "node_conv2d_3", "node_conv2d_4"}
    layers = {layer.name: layer.nodes for layer in prepared.layers.layers}
    assert layers["stem_0"] == ("node_conv2d",) and layers["classifier"] == ("node_linear",)
    readers = {reader.node for site in prepared.plan.sites for reader in site.readers}
    assert readers >= {"node_conv2d_1", "node_linear"} and not readers & left


def test_the_names_of_torch_itself() -> None:
    """A module that torch exported, against the names that torch.fx gives its layers and functions."""
    torch = pytest.importorskip("torch")
    from torch import fx, nn

    class Attention(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.qkv, self.proj = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            query, key, value = self.qkv(self.norm1(x)).chunk(3, -1)
            return x + self.proj((query @ key.transpose(-2, -1)).softmax(-1) @ value)

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2, self.relu = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.ReLU()
            self.downsample = nn.Sequential(nn.Conv2d(3, 8, 3))

        def forward(self, x: Any) -> Any:
            return self.relu(self.conv2(self.relu(self.conv1(x))) + self.downsample(x))

    class Net(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer1 = nn.Sequential(Block())
            self.blocks = nn.ModuleList([Attention(), Attention()])
            self.fc = nn.Linear(8, 10)

        def forward(self, x: Any) -> Any:
            x = self.layer1(x).flatten(2).transpose(1, 2)
            for block in self.blocks:
                x = block(x)
            return self.fc(x.mean(1))

    net, file = Net().eval(), io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net, torch.randn(1, 3, 6, 6), file, dynamo=False, opset_version=17)
    prepared = prepare(onnx.load_from_string(file.getvalue()), load(backend="virtual"), VIRTUAL)
    layers = {layer.name: layer.nodes for layer in prepared.layers.layers}
    called = [node.name for node in fx.symbolic_trace(net).graph.nodes if node.op.startswith("call")]
    shapes = re.compile("chunk|getitem|flatten|transpose")
    assert {name for name in called if not shapes.match(name)} <= set(layers)
    assert layers["layer1_0_relu_1"] == ("/layer1/layer1.0/relu_1/Relu",)
    assert layers["add_2"] == next(nodes for nodes in layers.values() if nodes[0].startswith("/blocks.1/Add"))
    assert layers["softmax_1"] == ("/blocks.1/Softmax",)
