"""Structure behind each output of a model: the last operator that is not just layout, followed through branches."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

import onnx

from sbonnx.ops import ADDS, ELEMENTWISE, KEEPS_VALUES, RECURRENT, RESHAPES

End = Literal["softmax", "linear", "recurrent", "selection", "index", "other"]

POOLS: Final = frozenset({"ReduceMean", "GlobalAveragePool"})

LAYOUT: Final = KEEPS_VALUES | RESHAPES | POOLS
"""Operators that are passed on the way back from an output: the same values in another form, or averages of them."""

AFFINE: Final = ADDS | ELEMENTWISE
"""Operators that are passed if their other input is a constant: biases and temperatures of logits."""

ENDS: Final[Mapping[str, End]] = {
    "Softmax": "softmax",
    "LogSoftmax": "softmax",
    "Gemm": "linear",
    "MatMul": "linear",
    "MatMulNBits": "linear",
    "NonMaxSuppression": "selection",
    "TopK": "selection",
    "ArgMax": "index",
    "ArgMin": "index",
}

SCORES: Final = re.compile(
    r"(?<![a-z])(logits?|class(es|ifiers?|ification)?|probs?|probability|probabilities|scores?)(?![a-z])", re.IGNORECASE
)
"""Words in names of outputs, layers and weights that mean scores of classes."""

STATES: Final = re.compile(
    r"present|past|cache|(?<!hidden[_.])state|(?<![a-z])(next|new)(?![a-z])|(?<![a-z])[hc](n|0|_?[n0]|_?out|_?in|_?next|_?prev|_?new)?(?![a-z0-9])",
    re.IGNORECASE,
)
"""Parts of names of caches and recurrent states: present.0.key, cache_last_time, stateN, hn, c_out."""

CACHES: Final = re.compile("present|past|cache", re.IGNORECASE)
"""Those of caches."""

STEPS: Final = 64
"""Maximum number of operators that are followed back from an output."""


@dataclass(frozen=True)
class OutputForm:
    """Structure behind one output.

    Attributes:
        end: kind of the last operator that changes values.
        classes: length of the axis after the batch axis, if it is static and no other axis follows that is longer
            than 1; else 0. Classes have such an axis.
        pooled: values are averaged over positions on the way to the output.
        named: whether the output, or the operator that gives its values, has a name that means scores of classes.
        state: whether the name is that of a cache or a recurrent state.
        cache: whether it is that of a cache, which needs no input on the first run.
    """

    end: End = "other"
    classes: int = 0
    pooled: bool = False
    named: bool = False
    state: bool = False
    cache: bool = False


UNKNOWN_FORM: Final = OutputForm()


def output_forms(model: onnx.ModelProto) -> dict[str, OutputForm]:
    """Return the structure behind each output of a model, by name."""
    producers = _makers(model.graph)
    forms = {}
    for output in model.graph.output:
        form = _form(output.name, (producers,))
        forms[output.name] = replace(
            form,
            classes=_class_axis(output),
            named=form.named or _is_score(output.name),
            state=STATES.search(output.name) is not None,
            cache=CACHES.search(output.name) is not None,
        )
    return forms


def _class_axis(output: onnx.ValueInfoProto) -> int:
    """Return the length of the axis that may be one of classes: of (batch, classes) or (batch, classes, 1, ...)."""
    axes = [axis.dim_value if axis.HasField("dim_value") else 0 for axis in output.type.tensor_type.shape.dim]
    return axes[1] if len(axes) > 1 and axes[1] > 1 and all(axis == 1 for axis in axes[2:]) else 0


def _is_score(name: str) -> bool:
    return SCORES.search(name) is not None


_Makers = Mapping[str, tuple[onnx.NodeProto, int]]


def _makers(graph: onnx.GraphProto) -> _Makers:
    return {name: (node, index) for node in graph.node for index, name in enumerate(node.output) if name}


def _form(name: str, scopes: tuple[_Makers, ...]) -> OutputForm:
    pooled = named = False
    for _ in range(STEPS):
        producer = next((makers[name] for makers in scopes if name in makers), None)
        if producer is None:
            return OutputForm(pooled=pooled)
        node, index = producer
        if node.op_type == "If":
            forms = {_form(body.output[index].name, (_makers(body), *scopes)) for body in _bodies(node)}
            return replace(forms.pop(), pooled=pooled) if len(forms) == 1 else UNKNOWN_FORM
        if node.op_type in AFFINE and (passed := _variable_input(node, scopes)):
            name, named = passed, named or _says_scores(node)
            continue
        if node.op_type not in LAYOUT or not node.input:
            return replace(_of_node(node, index), pooled=pooled, named=named or _says_scores(node))
        pooled |= node.op_type in POOLS
        name = node.input[0]
    return UNKNOWN_FORM


def _variable_input(node: onnx.NodeProto, scopes: tuple[_Makers, ...]) -> str:
    """Return the only input that another operator computes; "" if there are none or several."""
    names = [
        name for name in node.input if (producer := _made(name, scopes)) is not None and producer.op_type != "Constant"
    ]
    return names[0] if len(names) == 1 else ""


def _made(name: str, scopes: tuple[_Makers, ...]) -> onnx.NodeProto | None:
    return next((makers[name][0] for makers in scopes if name in makers), None)


def _of_node(node: onnx.NodeProto, index: int) -> OutputForm:
    if node.op_type in RECURRENT:
        return OutputForm("recurrent" if index > 0 else "other")  # from the second on they are states
    return OutputForm(ENDS.get(node.op_type, "other"))


def _says_scores(node: onnx.NodeProto) -> bool:
    return any(map(_is_score, (node.name, *node.input[1:])))


def _bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    yield from (attribute.g for attribute in node.attribute if attribute.HasField("g"))
