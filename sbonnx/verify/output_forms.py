"""Structure behind each output of a model: the last operator that is not just layout, followed through branches."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

import onnx

from sbonnx.ops import KEEPS_VALUES, RECURRENT, RESHAPES

End = Literal["softmax", "sigmoid", "tanh", "norm", "recurrent", "selection", "other"]

LAYOUT: Final = KEEPS_VALUES | RESHAPES | {"ReduceMean", "GlobalAveragePool"}
"""Operators that are passed on the way back from an output: the same values in another form, or averages of them."""

ENDS: Final[Mapping[str, End]] = {
    "Softmax": "softmax",
    "LogSoftmax": "softmax",
    "Sigmoid": "sigmoid",
    "HardSigmoid": "sigmoid",
    "Tanh": "tanh",
    "LpNormalization": "norm",
    "LayerNormalization": "norm",
    "SimplifiedLayerNormalization": "norm",
    "RMSNormalization": "norm",
    "BatchNormalization": "norm",
    "NonMaxSuppression": "selection",
    "TopK": "selection",
}

SCORES: Final = re.compile(
    r"(?<![a-z])(logits?|class(es|ifiers?|ification)?|probs?|probability|probabilities|scores?)(?![a-z])", re.IGNORECASE
)
"""Words in names of outputs, layers and weights that mean scores of classes."""

STEPS: Final = 64
"""Maximum number of operators that are followed back from an output."""


@dataclass(frozen=True)
class OutputForm:
    """Structure behind one output.

    Attributes:
        end: kind of the last operator that changes values.
        axis: axis of a softmax as the file has it, None if its tensor is moved on the way to the output.
        named: whether the output, or the operator that gives its values, has a name that means scores of classes.
    """

    end: End = "other"
    axis: int | None = None
    named: bool = False


UNKNOWN_FORM: Final = OutputForm()


def output_forms(model: onnx.ModelProto) -> dict[str, OutputForm]:
    """Return the structure behind each output of a model, by name."""
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 1)
    made = _makers(model.graph)
    forms = {output.name: _form(output.name, (made,), opset) for output in model.graph.output}
    return {name: replace(form, named=form.named or _is_score(name)) for name, form in forms.items()}


def _is_score(name: str) -> bool:
    return SCORES.search(name) is not None


_Makers = Mapping[str, tuple[onnx.NodeProto, int]]


def _makers(graph: onnx.GraphProto) -> _Makers:
    return {name: (node, index) for node in graph.node for index, name in enumerate(node.output) if name}


def _form(name: str, scopes: tuple[_Makers, ...], opset: int) -> OutputForm:
    moved = False
    for _ in range(STEPS):
        found = next((makers[name] for makers in scopes if name in makers), None)
        if found is None:
            return UNKNOWN_FORM
        node, index = found
        if node.op_type == "If":
            forms = {_form(body.output[index].name, (_makers(body), *scopes), opset) for body in _bodies(node)}
            form = forms.pop() if len(forms) == 1 else UNKNOWN_FORM
            return OutputForm(form.end) if moved else form
        if node.op_type not in LAYOUT or not node.input:
            return _of_node(node, index, moved, opset)
        moved |= node.op_type not in KEEPS_VALUES
        name = node.input[0]
    return UNKNOWN_FORM


def _of_node(node: onnx.NodeProto, index: int, moved: bool, opset: int) -> OutputForm:
    if node.op_type in RECURRENT:
        return OutputForm("recurrent" if index > 0 else "other")  # from the second on they are states
    end = ENDS.get(node.op_type, "other")
    named = end == "other" and any(map(_is_score, (node.name, *node.input[1:])))
    if end != "softmax" or moved:
        return OutputForm(end, named=named)
    given = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), None)
    return OutputForm(end, given if given is not None else -1 if opset >= 13 else 1)


def _bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    yield from (attribute.g for attribute in node.attribute if attribute.HasField("g"))
