"""The first operator that computes something else in a runtime than in the reference, from equal inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import onnx

from sbonnx.backends.fixed_shapes import open_for
from sbonnx.backends.runtime_types import Runtime
from sbonnx.metrics.error_sums import sqnr_db
from sbonnx.report.comparison import OperatorDifference
from sbonnx.runtimes.cut_models import CutModel, Piece
from sbonnx.runtimes.ort_variants import ORT_REFERENCE
from sbonnx.spec import Array

ROUNDED_SHARE: Final = 0.1
"""Share of codes that may differ by one step: sums of products are rounded in another order, some in half precision.

Measured on ResNet-20: 6.1 % at one convolution of Qualcomm's HTP emulator, whose outputs are 0.3 dB from the reference.
Rounding to the wrong side changes about half of the codes."""

SIGMAS: Final = 3.0
"""Standard deviations by which the number of such codes may exceed the share, for small tensors."""

FLOAT_DB: Final = 50.0
"""SQNR in dB of one float operator that half precision reaches, and of codes of 16 bits. Chosen on ResNet-20."""

FLOAT32: Final = "equal with float operators in float32: the runtime computes them in fewer bits"
HALVED: Final = "equal with halved weights: the runtime computes large sums of 8-bit products otherwise"
EVEN: Final = "equal with one scale for all channels: the smallest scales are too small for the kernel"


def first_difference(runtime: Runtime, file: Path, feeds: Mapping[str, Array]) -> OperatorDifference | None:
    """Find the first operator of a file that differs in a runtime beyond rounding.

    The file is cut at the edges of quantized operators, and each piece computes in the runtime from the values of the
    reference. The first piece that differs is cut further, at each of its tensors. Of a piece without an operator that
    differs alone, the operator with products is named. Changes that make the difference vanish are tried as its cause.

    Args:
        feeds: of one run.

    Returns:
        None if each piece differs by no more than rounding explains.

    Raises:
        ModelError, DataError: the runtime rejects the model that is cut.
    """
    model = CutModel(onnx.load(str(file)))
    edges = model.edges()
    difference = _first(runtime, model, edges, feeds)
    if difference is None:
        return None
    piece, why = difference
    cuts = list(dict.fromkeys((*edges, *model.inside(piece))))
    single = _first(runtime, model, cuts, feeds, only=frozenset(model.inside(piece)))
    if single is not None and not single[0].is_pair:
        piece, why = single  # a cut before a Q node ends a fusion, and its input is rounded otherwise
    named = piece.named
    nodes = tuple(node.name for node in piece.computing)
    cause = _cause(runtime, model, cuts if single is not None and piece is single[0] else edges, piece.output, feeds)
    return OperatorDifference(named.name or named.output[0], named.op_type, piece.output, nodes, why, cause)


def _cause(runtime: Runtime, model: CutModel, cuts: Sequence[str], output: str, feeds: Mapping[str, Array]) -> str:
    """Return the change of the file or of the runtime without which a tensor does not differ; "" if there is none."""
    trials = [(HALVED, runtime, model.with_halved_weights()), (EVEN, runtime, model.with_even_scales())]
    if runtime.open_float32 is not None:
        trials.insert(0, (FLOAT32, replace(runtime, open=runtime.open_float32), model))
    equal = (
        cause
        for cause, other, changed in trials
        if _first(other, changed, cuts, feeds, only=frozenset([output])) is None
    )
    return next(equal, "")


def _first(
    runtime: Runtime,
    model: CutModel,
    cuts: Sequence[str],
    feeds: Mapping[str, Array],
    *,
    only: frozenset[str] | None = None,
) -> tuple[Piece, str] | None:
    """Return the first piece that differs, and how. `only`: outputs that are compared; None: all."""
    reference = ORT_REFERENCE.open(model.with_outputs(cuts), None)
    names = [entry.name for entry in reference.get_outputs()]
    values = dict(zip(names, reference.run(None, feeds), strict=True))
    kept = [name for name in cuts if isinstance(values[name], np.ndarray) and values[name].size]
    source, given = model.cut(kept, values)
    inputs = {**feeds, **given}
    opened = open_for(runtime, source, inputs)
    results = dict(zip((entry.name for entry in opened.get_outputs()), opened.run(None, inputs), strict=True))
    pieces = [
        model.piece(name, [cut for cut in kept if cut != name]) for name in results if only is None or name in only
    ]
    order = {name: place for place, node in enumerate(model.proto.graph.node) for name in node.output}
    for piece in sorted(pieces, key=lambda piece: order[piece.output]):
        why = beyond_rounding(values[piece.output], results[piece.output], model.step(piece.output))
        if why is not None and piece.nodes:
            return piece, why
    return None


def beyond_rounding(reference: Array, value: Array, step: float | None) -> str | None:
    """Return how a tensor differs beyond what rounding explains, or None.

    Args:
        step: scale of its codes; None: of floats; integers have the step 1.
    """
    if value.size != reference.size:
        return f"its shape is {list(value.shape)}, and {list(reference.shape)} in the reference"
    expected, other = reference.astype(np.float64).ravel(), value.astype(np.float64).ravel()
    finite = np.isfinite(expected)
    if not np.isfinite(other[finite]).all():
        return "values are not finite, and they are in the reference"
    expected, other = expected[finite], other[finite]
    distance = sqnr_db(expected, other)
    if distance == math.inf:
        return None
    if step is None and reference.dtype.kind == "f":
        return f"{distance:.1f} dB from the reference" if distance < FLOAT_DB else None
    steps = np.abs(np.round((other - expected) / (step or 1)))
    changed, most = int((steps > 0).sum()), int(steps.max())
    share = ROUNDED_SHARE * steps.size
    if (most <= 1 and changed <= 1 + share + SIGMAS * math.sqrt(share)) or distance >= FLOAT_DB:
        return None
    return f"{changed} of {steps.size} values differ, by up to {most} steps"
