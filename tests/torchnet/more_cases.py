"""Cases of `test_functions` for ops beyond layers and arithmetic."""

from __future__ import annotations

from typing import Any

X = "float[2,4,6,5] x"
SMALL = "float[3,4] x"
ROWS = "float[2,6,5] x"
RECURRENT = "float[5,2,3] x, float[1,{0},4] w, float[1,{0},4] r"
TWO_WAYS = "float[5,2,3] x, float[2,{0},3] w, float[2,{0},4] r, float[2,{1}] b"

MORE: dict[str, tuple[int, list[Any]]] = {
    "LpPool": (18, [("float[1,2,8,7] x", "y = LpPool <kernel_shape=[3,2], strides=[2,2], pads=[1,0,1,1]> (x)")]),
    "GlobalLpPool": (17, [(X, "y = GlobalLpPool <p=3> (x)")]),
    "Einsum": (17, [("float[2,3,4] x, float[2,4,5] w", "y = Einsum <equation='bij, bjk -> bik'> (x, w)")]),
    "Det": (17, [("float[2,3,3] x", "y = Det (x)")]),
    "DFT": (
        20,
        [
            ("float[2,6,5,1] x", "y = DFT <onesided=1> (x, c, d)", 8, 1),
            ("float[2,6,5,2] x", "y = DFT <inverse=1> (x, , c)", -2),
            ("float[2,6,5,1] x", "y = DFT (x, c, d)", 4, -3),
        ],
    ),
    "STFT": (
        17,
        [
            ("float[2,32,1] x, float[8] w", "y = STFT (x, c, w)", 4),
            ("float[2,32,1] x", "y = STFT <onesided=0> (x, c, , d)", 5, 16),
        ],
    ),
    "DeformConv": (
        19,
        [
            (
                "float[2,4,7,6] x, float[4,2,3,2] w, float[2,24,4,3] o, float[4] b, float[2,12,4,3] m",
                "y = DeformConv <group=2, offset_group=2, strides=[2,2], pads=[1,0,1,1], dilations=[1,2]> "
                "(x, w, o, b, m)",
            ),
            ("float[1,2,5,4] x, float[3,2,2,2] w, float[1,8,4,3] o", "y = DeformConv (x, w, o)"),
        ],
    ),
    "MaxUnpool": (
        11,
        [
            (
                "float[2,3,8,6] x",
                "m, i = MaxPool <kernel_shape=[2,3], strides=[2,3]> (x) "
                "y = MaxUnpool <kernel_shape=[2,3], strides=[2,3]> (m, i)",
            )
        ],
    ),
    "Attention": (
        23,
        [
            ("float[2,4,3,8] q, float[2,2,5,8] k, float[2,2,5,8] v", "y = Attention (q, k, v)"),
            (
                "float[2,3,32] q, float[2,5,16] k, float[2,5,16] v, float[3,5] m",
                "y = Attention <q_num_heads=4, kv_num_heads=2, scale=0.5> (q, k, v, m)",
            ),
            ("float[1,2,4,8] q, float[1,2,4,8] k, float[1,2,4,8] v", "y = Attention <is_causal=1> (q, k, v)"),
        ],
    ),
    "RotaryEmbedding": (
        23,
        [
            ("float[2,3,4,8] x, float[2,4,4] c1, float[2,4,4] s1", "y = RotaryEmbedding (x, c1, s1)"),
            (
                "float[2,4,24] x, float[2,4,4] c1, float[2,4,4] s1",
                "y = RotaryEmbedding <num_heads=3, interleaved=1> (x, c1, s1)",
            ),
        ],
    ),
    "SplitToSequence": (
        17,
        [
            (ROWS, "s = SplitToSequence <axis=1> (x, c) y = SequenceAt (s, d)", 4, -1),
            (ROWS, "s = SplitToSequence <axis=-1> (x, c) y = SequenceAt (s, d)", [2, 0, 3], 2),
            (ROWS, "s = SplitToSequence (x) y = SequenceAt (s, c)", 1),
        ],
    ),
    "SequenceAt": (17, [(ROWS, "s = SplitToSequence <axis=1, keepdims=0> (x) y = SequenceAt (s, c)", -2)]),
    "SequenceConstruct": (
        17, [(ROWS, "s = SequenceConstruct (x, x) y = ConcatFromSequence <axis=-1, new_axis=1> (s)")]
    ),
    "ConcatFromSequence": (17, [(ROWS, "s = SequenceConstruct (x, x) y = ConcatFromSequence <axis=1> (s)")]),
    "SequenceEmpty": (
        17, [(ROWS, "e = SequenceEmpty () s = SequenceInsert (e, x) y = ConcatFromSequence <axis=0> (s)")]
    ),
    "SequenceInsert": (
        17,
        [
            (
                ROWS,
                "n = Neg (x) s = SequenceConstruct (x, x) t = SequenceInsert (s, n, c) "
                "y = ConcatFromSequence <axis=0> (t)",
                at,
            )
            for at in (-1, 0)
        ],
    ),
    "SequenceErase": (
        17,
        [
            (
                ROWS,
                "n = Neg (x) s = SequenceConstruct (n, x, x) t = SequenceErase (s, c) "
                "u = SequenceErase (t) y = ConcatFromSequence <axis=0> (u)",
                at,
            )
            for at in (-1, 0)
        ],
    ),
    "SequenceLength": (17, [(ROWS, "s = SequenceConstruct (x, x, x) y = SequenceLength (s)")]),
    "LSTM": (
        14,
        [
            (
                "float[5,2,3] x, float[1,16,3] w, float[1,16,4] r, float[1,32] b, float[1,2,4] h, float[1,2,4] i0",
                "y, z, u = LSTM <hidden_size=4> (x, w, r, b, , h, i0)",
            ),
            (
                TWO_WAYS.format(16, 32),
                "y, z, u = LSTM <hidden_size=4, direction='bidirectional', clip=0.5> (x, w, r, b)",
            ),
            (
                "float[5,2,3] x, float[1,16,3] w, float[1,16,4] r, float[1,12] p",
                "y, z, u = LSTM <hidden_size=4, direction='reverse'> (x, w, r, , , , , p)",
            ),
        ],
    ),
    "GRU": (
        14,
        [
            (TWO_WAYS.format(12, 24), "y, z = GRU <hidden_size=4, direction='bidirectional'> (x, w, r, b)"),
            (
                TWO_WAYS.format(12, 24),
                "y, z = GRU <hidden_size=4, direction='bidirectional', linear_before_reset=1> (x, w, r, b)",
            ),
        ],
    ),
    "RNN": (
        14,
        [
            (TWO_WAYS.format(4, 8), "y, z = RNN <hidden_size=4, direction='bidirectional'> (x, w, r, b)"),
            (
                "float[5,2,3] x, float[1,4,3] w, float[1,4,4] r, float[1,8] b",
                "y, z = RNN <hidden_size=4, activations=['Relu']> (x, w, r, b)",
            ),
        ],
    ),
    "QuantizeLinear": (
        13,
        [
            ("float[3,4] x, float[1] p, int8[1] i", "y = QuantizeLinear (x, p, i)"),
            ("float[3,4] x, float[4] p, uint8[4] i", "y = QuantizeLinear <axis=1> (x, p, i)"),
        ],
    ),
    "DequantizeLinear": (
        21,
        [
            ("int8[3,4] i, float[4] p, int8[4] j", "y = DequantizeLinear <axis=1> (i, p, j)"),
            ("int8[3,4] i, float[3,2] p", "y = DequantizeLinear <axis=1, block_size=2> (i, p)"),
        ],
    ),
    "DynamicQuantizeLinear": (17, [(SMALL, "y, z, u = DynamicQuantizeLinear (x)")]),
    "MatMulInteger": (17, [("uint8[3,4] i, int8[4,5] j, uint8 k, int8[5] l", "y = MatMulInteger (i, j, k, l)")]),
    "ConvInteger": (
        17,
        [("uint8[1,2,5,5] i, uint8[3,2,3,3] j, uint8 k", "y = ConvInteger <pads=[1,1,1,1]> (i, j, k)")],
    ),
    "QLinearMatMul": (
        17,
        [
            (
                "uint8[3,4] i, float p, uint8 k, uint8[4,5] j, float q, uint8 l, float r, uint8 m",
                "y = QLinearMatMul (i, p, k, j, q, l, r, m)",
            )
        ],
    ),
    "QLinearConv": (
        17,
        [
            (
                "uint8[1,2,5,5] i, float p, uint8 k, uint8[3,2,3,3] j, float q, uint8 l, float r, uint8 m, int32[3] b",
                "y = QLinearConv <pads=[1,1,1,1]> (i, p, k, j, q, l, r, m, b)",
            )
        ],
    ),
    **{op: (17, [(SMALL, f"y = {op} (x)")]) for op in ("Tan", "Atan", "Sinh", "Cosh", "Asinh", "IsNaN", "Hardmax")},
    **{op: (17, [(SMALL, f"a = Tanh(x) y = {op} (a)")]) for op in ("Asin", "Acos", "Atanh")},
    "Acosh": (17, [(SMALL, "a = Cosh(x) y = Acosh (a)")]),
    "Shrink": (17, [(SMALL, "y = Shrink <lambd=0.3, bias=0.1> (x)")]),
    "IsInf": (17, [(SMALL, "a = Div(x, c) y = IsInf <detect_negative=0> (a)", [0.0])]),
    "BitShift": (17, [("uint8[3,4] i, uint8[4] j", "y = BitShift <direction='RIGHT'> (i, j)")]),
    **{
        op: (18, [("int32[3,4] i, int32[4] j", f"y = {op} (i, j)")])
        for op in ("BitwiseAnd", "BitwiseOr", "BitwiseXor")
    },
    "BitwiseNot": (18, [("int32[3,4] i", "y = BitwiseNot (i)")]),
    "Xor": (17, [("bool[3,4] t, bool[4] u", "y = Xor (t, u)")]),
    "ReduceLogSum": (17, [("float[3,4] p", "y = ReduceLogSum <axes=[1]> (p)")]),
    "ArgMin": (17, [(X, "y = ArgMin <axis=1> (x)"), ("int32[3,9] i", "y = ArgMin <axis=1, select_last_index=1> (i)")]),
    "LRN": (17, [(X, "y = LRN <size=3, alpha=0.5, beta=0.6, bias=2.0> (x)")]),
    "MeanVarianceNormalization": (17, [(X, "y = MeanVarianceNormalization (x)")]),
    "CumSum": (17, [(X, "y = CumSum <exclusive=1, reverse=1> (x, c)", [2]), (X, "y = CumSum (x, c)", [-1])]),
    "GatherND": (
        17,
        [
            (X, "y = GatherND (x, c)", [[0, 1, 2], [1, -1, 3]]),
            (X, "y = GatherND <batch_dims=1> (x, c)", [[[0, 1], [3, 2]], [[2, 2], [-1, 5]]]),
        ],
    ),
    "ScatterElements": (
        18,
        [
            ("float[3,4] x, float[1,4] w", "y = ScatterElements <axis=0> (x, c, w)", [[2, 0, -1, 1]]),
            (
                "float[3,4] x, float[2,4] w",
                "y = ScatterElements <axis=0, reduction='add'> (x, c, w)",
                [[2, 0, 1, 1], [2, 0, 0, 1]],
            ),
        ],
    ),
    "ScatterND": (
        18,
        [
            ("float[3,4] x, float[2,4] w", "y = ScatterND (x, c, w)", [[2], [-3]]),
            ("float[3,4] x, float[2] w", "y = ScatterND <reduction='max'> (x, c, w)", [[2, 1], [0, -1]]),
        ],
    ),
    "ReverseSequence": (17, [("float[4,3,2] x", "y = ReverseSequence (x, c)", [2, 4, 1])]),
    "Compress": (
        17,
        [("float[3,4] x, bool[3] t", "y = Compress <axis=0> (x, t)"), (SMALL + ", bool[9] t", "y = Compress (x, t)")],
    ),
    "NonZero": (17, [("int32[3,4] i", "y = NonZero (i)")]),
    "OneHot": (
        17,
        [
            ("int64[3,2] i", "y = OneHot <axis=1> (i, c, d)", 3, [0.5, 2.0]),
            ("int64[3] i", "y = OneHot (i, c, d)", [2], [0.0, 1.0]),
        ],
    ),
    "TopK": (17, [(X, "y, z = TopK <axis=2> (x, c)", [3]), (X, "y, z = TopK <largest=0> (x, c)", [2])]),
    "Unique": (17, [("float[9] x", "a = Round(x) y, z, u, v = Unique (a)")]),
    "Trilu": (17, [(X, "y = Trilu <upper=0> (x, c)", -1), (X, "y = Trilu (x)")]),
    "EyeLike": (17, [(SMALL, "y = EyeLike <k=1> (x)"), (SMALL, "y = EyeLike <dtype=7> (x)")]),
    "GridSample": (
        16,
        [
            ("float[1,2,5,4] x, float[1,3,3,2] g", "y = GridSample (x, g)"),
            ("float[1,2,5,4] x, float[1,3,3,2] g", "y = GridSample <mode='nearest', padding_mode='border'> (x, g)"),
            ("float[1,2,5,4] x, float[1,3,3,2] g", "y = GridSample <mode='bicubic', align_corners=1> (x, g)"),
        ],
    ),
    "AffineGrid": (20, [("float[2,2,3] x", "y = AffineGrid (x, c)", [2, 3, 4, 5])]),
    "Col2Im": (18, [("float[1,8,9] x", "y = Col2Im (x, c, d)", [4, 4], [2, 2])]),
    "CenterCropPad": (18, [(SMALL, "y = CenterCropPad (x, c)", [6, 2])]),
    "RoiAlign": (
        16,
        [
            (
                "float[2,2,8,8] x",
                "y = RoiAlign <output_height=2, output_width=3, sampling_ratio=2, spatial_scale=0.5> (x, c, d)",
                [[1.0, 1.0, 9.0, 11.0], [0.0, 2.5, 5.0, 14.0]],
                [0, 1],
            )
        ],
    ),
    "NonMaxSuppression": (
        11,
        [
            (
                "float[1,6,4] x, float[1,2,6] p",
                "y = NonMaxSuppression (x, p, c, d, e)",
                [3],
                [0.3],
                [0.2],
            )
        ],
    ),
}  # fmt: skip
"""By op: (opset, its cases)."""

ELSEWHERE = {"CumProd", "TensorScatter"}
"""Ops that onnxruntime has no kernel for: held against ONNX's own data, in tests/qat/test_reimport_nodes.py."""
