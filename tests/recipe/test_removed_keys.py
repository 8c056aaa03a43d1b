"""Keys of released versions that were removed: saved recipes load, and settings that did something are named."""

from __future__ import annotations

from typing import Any

import pytest

from sbonnx.errors import RecipeError
from sbonnx.recipe import load
from sbonnx.recipe.names import REMOVED, REMOVED_FORMS
from sbonnx.recipe.sections.whole import SHORT_FORMS

SAVED: dict[str, Any] = {
    "W": {
        "ROUNDING": {"ADAROUND": {"LOSS": "moments", "SCOPE": "block", "DROP": 0.5, "SCALE_LR": 0.01, "LR": 0.2}},
        "SPECIFIC": [{"conv*": {"ROUNDING": {"ADAROUND": {"LOSS": "moments", "SCOPE": "layer"}}}}],
    },
    "EQUALIZE": {"SPLIT_CHANNELS": 0.0},
    "CALIBRATION": {"WORKERS": 4},
}
"""As `sbonnx recipe` of 0.2.0 writes it: with every key."""


def test_a_saved_recipe_loads() -> None:
    recipe = load(SAVED)
    assert recipe.w.rounding.adaround.lr == 0.2
    assert "LOSS" not in recipe.to_dict()["W"]["ROUNDING"]["ADAROUND"]
    assert "WORKERS" not in recipe.to_dict()["CALIBRATION"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"W": {"ROUNDING": {"ADAROUND": {"LOSS": "batches"}}}}, r"'W.ROUNDING.ADAROUND.LOSS' .*sbonnx qat"),
        ({"EQUALIZE": {"SPLIT_CHANNELS": 0.1}}, r"'EQUALIZE.SPLIT_CHANNELS' .*per-channel-symmetric"),
        (
            {"W": {"SPECIFIC": [{"conv*": {"ROUNDING": {"ADAROUND": {"LOSS": "batches"}}}}]}},
            r"ROUNDING.ADAROUND.LOSS' .*sbonnx qat",
        ),
    ],
)
def test_a_recipe_that_asks_for_it_is_one_sentence(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        load(asked)
    assert "was removed" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["workers", "split_channels", "w.rounding.adaround.loss", "CALIBRATION.WORKERS"])
def test_overrides_are_one_sentence(name: str) -> None:
    with pytest.raises(RecipeError, match=r"was removed\. [A-Z]"):
        load(None, overrides={name: 1})


def test_no_key_is_both() -> None:
    assert set(REMOVED_FORMS.values()) <= REMOVED.keys()
    assert not REMOVED_FORMS.keys() & SHORT_FORMS.keys()
