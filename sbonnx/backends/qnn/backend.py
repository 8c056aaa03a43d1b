"""QNN execution provider of onnxruntime: every supported op is a node unit, with pairs at its inputs and outputs.

The provider takes a node with the DequantizeLinear nodes before it and the QuantizeLinear nodes after it as one
operation on integers. A node without them computes in float, or on the CPU where the HTP has no float.

Source: operators, types and axes that the provider's builders and onnxruntime's `get_qnn_qdq_config` accept
(docs/qnn.md). Nothing was run on a Qualcomm device.
"""

from __future__ import annotations

from typing import Final, Literal

from sbonnx.backends.base import Backend, Files, Numbers, WideTypes
from sbonnx.backends.mode_limits import PER_TENSOR, SYMMETRIC, ModeLimits, SideLimits
from sbonnx.backends.placement_rules import Placement, Rule
from sbonnx.backends.qnn.gathered_tables import quantize_tables
from sbonnx.backends.qnn.rectifiers import settle_rectifiers
from sbonnx.graph import Graph, Node
from sbonnx.ops import (
    ADDS,
    CONCATS,
    ELEMENTWISE,
    LINEAR,
    MATRIX_PRODUCTS,
    MOVES_DATA,
    PADS,
    PICKS_MAX,
    POOLS,
    RECTIFIERS,
    REDUCES,
    RESIZES,
)
from sbonnx.report.codes import Reason
from sbonnx.schemes import BY_WIDTH
from sbonnx.spec import QuantSpec, ScaleLimits

WIDE: Final = 16
"""Bits of wide activations."""

OPERANDS: Final = (
    ADDS | ELEMENTWISE | MATRIX_PRODUCTS | CONCATS | {"Max", "Min", "Pow", "PRelu", "Where", "Sum", "Mean", "Gather"}
)
"""Ops that may read a float constant, which is quantized in the type of the activations."""

LAYER_NORMALIZATIONS: Final = frozenset({"LayerNormalization", "RMSNormalization"})
"""Normalizations whose scale must be uint8: with int8 beside an int32 bias, the HTP leaves them to the CPU."""

NORMALIZATIONS: Final = LAYER_NORMALIZATIONS | {"InstanceNormalization"}
"""Normalizations with a scale and a bias."""

OTHERS: Final = (
    RECTIFIERS
    | POOLS
    | PICKS_MAX
    | RESIZES
    | PADS
    | REDUCES
    | (MOVES_DATA - {"Identity", "Gather"})
    | {
        "ReduceL2",
        "ReduceMax",
        "ReduceMin",
        "ReduceProd",
        "Sigmoid",
        "Tanh",
        "LeakyRelu",
        "Elu",
        "HardSigmoid",
        "HardSwish",
    }
    | {"Gelu", "ThresholdedRelu", "Softmax", "LogSoftmax", "LpNormalization", "LRN", "GridSample", "Einsum", "TopK"}
    | {"Abs", "Exp", "Log", "Neg", "Sqrt", "Reciprocal", "Sin", "Cos", "ArgMax", "ArgMin", "CumSum"}
)
"""Other ops that the provider has a builder for."""

MIXED: Final = frozenset({"Add", "Sub", "Mul", "Div", *LAYER_NORMALIZATIONS})
"""Ops whose inputs and output may have different widths. In the emulator of the HTP a MatMul with 8 and 16 bits runs on
the CPU, and the graph of a Gelu is not built."""

UNIT: Final = "the QNN provider runs it in integers as a node unit, with pairs at every input and output"

RULES: Final = (
    Rule("node unit with operands", OPERANDS, "unit", constants="operands", why=UNIT),
    Rule("normalization unit", NORMALIZATIONS, "unit", constants="parameters", why=UNIT),
    Rule("node unit", OTHERS, "unit", why=UNIT),
)

OPENED: Final = frozenset({"silu", "hardswish", "attention_softmax"})
"""Decomposed blocks whose ops all have builders. GELU needs Erf, and the sums of squares in a normalization need more
than 8 bits: their native ops are node units. Decomposed, normalizations stay float, and GELU is written as one op."""


PRESCRIBED: Final = {
    ("Sigmoid", "uint16"): (2.0**-16, 0),
    ("Sigmoid", "int16"): (2.0**-15, 0),
    ("Tanh", "uint16"): (2.0**-15, 1 << (WIDE - 1)),
    ("Tanh", "int16"): (2.0**-15, 0),
}
"""Scales and zero points that QNN prescribes for outputs, by op and type."""


class QnnNumbers(Numbers):
    """Unsigned activations and affine weights, signed symmetric weights, prescribed scales of some outputs."""

    def spec(self, side: Literal["w", "a"], bits: int, symmetric: bool, axis: int | None) -> QuantSpec:
        """Return unsigned types for activations, and signed ones for symmetric weights; affine weights are unsigned."""
        return QuantSpec(bits=bits, signed=side == "w" and symmetric, symmetric=symmetric, axis=axis)

    def output_params(self, node: Node, spec: QuantSpec) -> tuple[float, int] | None:
        """Return the scale and zero point that QNN prescribes for the output of an op in a type, or None."""
        return PRESCRIBED.get((node.op, spec.dtype.name))

    def unfit(self, node: Node, spec: QuantSpec) -> Reason | None:
        """Return the reason why the QNN provider does not support weights of a type at an op, or None."""
        if node.op == "ConvTranspose" and spec.axis is not None and int(node.attrs.get("group", 1)) > 1:
            return Reason(
                "groups-share-scales",
                "its groups share the scales of output channels: use per-tensor-symmetric weights",
            )
        return None


class QnnFiles(Files):
    """Q/DQ with rectifiers and tables that the provider can read."""

    def legalise(self, graph: Graph) -> list[str]:
        """Make node units of rectifiers, or remove those without effect; store tables as integers.

        In place; return what was done.
        """
        return [*settle_rectifiers(graph), *quantize_tables(graph)]


QNN: Final = Backend(
    name="qnn",
    placement=Placement(
        linear=frozenset(LINEAR),
        rules=RULES,
        linear_output=frozenset(LINEAR),
        writes_outputs=True,
        folds=RECTIFIERS,
        opens=OPENED,
    ),
    numbers=QnnNumbers(
        int32_bias=True,
        one_scale=MATRIX_PRODUCTS | LAYER_NORMALIZATIONS,
        only_channels=True,
        tensor_overrides=True,
        narrow_depthwise=True,
        scales=ScaleLimits(quotient=2.0**-23),
        wide=WideTypes(WIDE, mixed=MIXED, channels=MATRIX_PRODUCTS),
    ),
    files=QnnFiles(whole_gelus=True),
    modes={
        "static": ModeLimits(
            weights=SideLimits((8,), (*SYMMETRIC, "per-tensor-affine", BY_WIDTH), BY_WIDTH),
            activations=SideLimits((8, WIDE), PER_TENSOR, "per-tensor-affine", observer="mse"),
            defaults={"HEADS": "none"},  # a region in float would leave the processor that the file is for
        )
    },
)
