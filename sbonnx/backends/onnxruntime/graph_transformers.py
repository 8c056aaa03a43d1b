"""Graph transformers of onnxruntime: their names, which of them break a model, and the texts that say so.

They rewrite the graph when a session is opened. Some write operators that have no kernel for the tensors at hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

REWRITES: Final = (
    "QDQSelectorActionTransformer",
    "TransposeOptimizer",
    "TransposeOptimizer_CPUExecutionProvider",
    "NhwcTransformer",
    "NchwcTransformer",
    "LayerNormFusionL1",
    "LayerNormFusionL2",
    "SimplifiedLayerNormFusion",
    "SkipLayerNormFusion",
    "BiasSkipLayerNormFusion",
    "EmbedLayerNormFusion",
    "QDQPropagationTransformer",
    "QDQS8ToU8Transformer",
    "QDQFinalCleanupTransformer",
    "Avx2WeightS8ToU8Transformer",
    "DoubleQDQPairsRemover",
    "WhereDummyDq",
    "ReluQuantRewrite",
    "ClipQuantRewrite",
    "MatMulIntegerToFloatFusion",
    "DynamicQuantizeMatMulFusion",
    "DQMatMulNBitsFusion",
    "MatMulNBitsQkvFusion",
    "MatMulNBitsMlpFusion",
    "AttentionFusion",
    "GroupQueryAttentionFusion",
    "GroupQueryAttentionPreNormFusion",
    "GeluFusionL1",
    "GeluFusionL2",
    "FastGeluFusion",
    "QuickGeluFusion",
    "BiasGeluFusion",
    "BiasSoftmaxFusion",
    "ConvActivationFusion",
    "ConvAddActivationFusion",
    "ConvAddFusion",
    "ConvMulFusion",
    "ConvBNFusion",
    "GemmActivationFusion",
    "GemmSumFusion",
    "GemmTransposeFusion",
    "MatMulAddFusion",
    "MatMulActivationFusion",
    "MatMulScaleFusion",
    "MatmulTransposeFusion",
    "MatMul_BatchNormalization_Fusion",
    "Pad_Fusion",
    "DivMulFusion",
    "NotWhereFusion",
    "GatherToSliceFusion",
    "GatherSliceToSplitFusion",
    "SliceConcatToSpaceToDepthFusion",
    "ReshapeFusion",
    "ExpandElimination",
    "CastElimination",
    "CastChainElimination",
    "NoopElimination",
    "UnsqueezeElimination",
    "CommonSubexpressionElimination",
    "ConstantFolding",
)
"""Graph transformers of onnxruntime on CPUs, those most likely to fail first. Releases ignore unknown names."""

_CREATED: Final = re.compile(r"(_token_\d+)+$|/[A-Za-z0-9]*Fusion\w*/?$|/duplicated$")
"""Suffixes that onnxruntime appends to the names of nodes that it creates from others."""

_RUNNING: Final = re.compile(r"running (\w+) node\. Name:'([^']*)'")


def original_name(name: str) -> str:
    """Return the name in the file of a node of onnxruntime's optimized graph."""
    return _CREATED.sub("", name)


def broken_rewrites(attempt: Callable[[tuple[str, ...]], object]) -> tuple[str, ...]:
    """Find graph transformers of onnxruntime without which a model runs that fails with all of them.

    Args:
        attempt: opens and runs the model with these transformers disabled; raises if that fails.

    Returns:
        Names, none of which can be left out; empty if the model fails without all of `REWRITES`.
    """

    def runs(names: tuple[str, ...]) -> bool:
        try:
            attempt(names)
        except Exception:  # onnxruntime's own exceptions share no base class
            return False
        return True

    left: tuple[str, ...] = REWRITES
    if not runs(left):
        return ()
    size = len(left)
    while size > 1:
        size = (size + 1) // 2
        at = 0
        while at < len(left):
            fewer = left[:at] + left[at + size :]
            if fewer and runs(fewer):
                left = fewer
            else:
                at += size
    return left


def failing_node(said: str) -> tuple[str, str]:
    """Return type and original name of the node at which onnxruntime's message says that a run failed, or two ""."""
    running = _RUNNING.search(said)
    return ("", "") if running is None else (running[1], original_name(running[2]))


def blame(names: Sequence[str], said: str) -> str:
    """Return a clause that names broken rewrites, the node that they made, and what to do.

    Args:
        names: graph transformers; empty if disabling them one by one does not help.
        said: onnxruntime's message.
    """
    op, node = failing_node(said)
    place = f" (it fails in the {op} that was made at node '{node}')" if op else ""
    rewrites = " and ".join(f"'{name}'" for name in names) or "at its optimization levels above 'off'"
    float_ = f", or leave that node float (--exclude '{node}')" if node else ""
    out = f"InferenceSession(..., disabled_optimizers={list(names)})" if names else "ORT_DISABLE_ALL"
    return f"onnxruntime's own rewrite {rewrites} breaks it{place}, and it runs without: use {out}{float_}: {said}"
