"""Settings that other tools have, and what they are called here."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from onnxruntime.quantization import quantize_dynamic, quantize_static

import sbonnx
from sbonnx.errors import RecipeError
from sbonnx.recipe.keywords import RecipeKeywords
from sbonnx.recipe.sections.other_tools import COUNTERPARTS, counterpart
from sbonnx.recipe.sections.whole import KEYS

QUANTIZE: Any = sbonnx.quantize
OWN = {*inspect.signature(sbonnx.quantize).parameters, *RecipeKeywords.__annotations__}


@pytest.mark.parametrize("name", COUNTERPARTS)
def test_the_named_setting_exists(name: str) -> None:
    keyword, note = COUNTERPARTS[name]
    assert keyword in {*OWN, *KEYS} if keyword else note
    assert name == "bits" or name not in OWN, "a keyword of our own"
    sentence = counterpart(f"--{name.upper().replace('_', '-')}")
    assert sentence.startswith(f"--{name.upper().replace('_', '-')} is ") and note in sentence


def test_every_setting_of_onnxruntime_is_known() -> None:
    theirs = {*inspect.signature(quantize_static).parameters, *inspect.signature(quantize_dynamic).parameters}
    assert theirs <= {*COUNTERPARTS, *OWN}


def test_keywords_of_other_tools() -> None:
    with pytest.raises(RecipeError, match=r"^nodes_to_exclude is `exclude` here: patterns such as"):
        QUANTIZE("m.onnx", None, nodes_to_exclude=["a"])
    assert counterpart("no_such_setting") == ""
