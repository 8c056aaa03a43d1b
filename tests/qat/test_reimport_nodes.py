"""Reimported models of one node against the data of ONNX's own backend tests."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch")

from sbonnx import graph as graphs  # noqa: E402
from sbonnx.errors import ModelError  # noqa: E402
from sbonnx.torchnet import FUNCTIONS, Unfit, as_tensor  # noqa: E402
from sbonnx.torchnet.onnx_to_torch.reimport import reimport  # noqa: E402

DECLINED = {
    "test_batchnorm_.*_training_mode": "the batch statistics are outputs that other nodes read",
    "test_col2im_5d": "Col2Im has 3 spatial axes",
    "test_training_dropout": "Dropout is in training mode",
    "test_reduce_(max|min)_empty_set": "non-zero size",  # torch has no largest of nothing
    "test_unique_.*axis": "Unique along an axis is not supported",
    # onnxruntime divides by the whole length, as here; ONNX by the one before rounding
    "test_resize_downsample_scales_(linear|cubic)_align_corners": "off by",
}
"""Cases, by a pattern of their names, that are refused or differ, and how."""

LOOSE = {"float16": 2e-3, "bfloat16": 2e-2}


def cases() -> dict[str, Any]:
    """Cases with one node of an op that there is, on tensors, by name."""
    from onnx.backend.test.case.node import collect_testcases  # computes them, which takes seconds

    with np.errstate(all="ignore"):
        found = [case for case in collect_testcases(None) if case.data_sets]
    return {case.name: case for case in found if _is_ours(case.model)}


ELEMENTS = {
    onnx.TensorProto.DataType.Value(name)
    for name in ("FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE", "INT8", "UINT8", "INT16", "INT32", "INT64", "BOOL")
}
"""Types that torch computes with; it has hardly anything for wide unsigned integers and 8-bit floats."""


def _is_ours(model: onnx.ModelProto | None) -> bool:
    if model is None:
        return False
    values = [*model.graph.input, *model.graph.output]
    return all(value.type.tensor_type.elem_type in ELEMENTS for value in values) and (
        all(node.op_type in FUNCTIONS and not node.domain for node in model.graph.node)
        and all(value.type.HasField("tensor_type") for value in values)
        and len(model.graph.node) == 1
    )


def plain(value: Any) -> np.ndarray[Any, Any]:
    """A value of a data set, some of which are protos."""
    return onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)


def check(case: Any) -> str | None:
    """What is wrong, or None."""
    model = case.model
    opset = next(entry.version for entry in model.opset_import if not entry.domain)
    given, wanted = case.data_sets[0]
    try:
        module = reimport(graphs.load(model, opset=opset)).eval()
        feeds = [as_tensor(torch, plain(value), "cpu") for value in given]
        with torch.no_grad():
            found = module(*feeds)
    except (ModelError, Unfit) as error:
        return f"{type(error).__name__} {error}"
    for name, want in zip(module.meta["sbonnx"]["outputs"], wanted, strict=True):
        want, have = plain(want), found[name]
        have = have.view(torch.int16).numpy().view(want.dtype) if have.dtype == torch.bfloat16 else have.numpy()
        kind = want.dtype.name
        if have.dtype != want.dtype or have.shape != want.shape:
            return f"{name}: {have.dtype} {have.shape}, not {want.dtype} {want.shape}"
        if want.dtype.kind == "f" or want.dtype.name == "bfloat16":
            want, have = want.astype(np.float64), have.astype(np.float64)
            tolerance = LOOSE.get(kind, 1e-4)
            scale = np.abs(want[np.isfinite(want)]).max(initial=1.0)
            if not np.allclose(have, want, rtol=tolerance, atol=tolerance * scale, equal_nan=True):
                return f"{name}: off by {np.nanmax(np.abs(have.astype(np.float64) - want))}"
        elif not np.array_equal(have, want):
            return f"{name}: other values {have.reshape(-1)[:8]} {want.reshape(-1)[:8]}"
    return None


def as_expected(name: str, wrong: str | None) -> bool:
    known = next((why for pattern, why in DECLINED.items() if re.match(pattern, name)), None)
    if known is None or "without_axis" in name:
        return wrong is None
    return wrong is not None and known in wrong


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_data_of_onnx() -> None:
    found = cases()
    results = {name: check(case) for name, case in found.items()}
    assert not {name: wrong for name, wrong in results.items() if not as_expected(name, wrong)}
    assert len(found) > 700, len(found)
    ops = {case.model.graph.node[0].op_type for case in found.values()}
    assert len(ops) > 0.85 * len(FUNCTIONS), sorted(FUNCTIONS.keys() - ops)
