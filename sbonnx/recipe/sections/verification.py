"""VERIFY: data for the verification of the result, and limits that it must meet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, final

from pydantic import BeforeValidator, WithJsonSchema

from sbonnx.recipe import values
from sbonnx.recipe.problem import Wrong, short
from sbonnx.recipe.sections.keys import Section, key

BY_OUTPUT: Final = ("VERIFY.MIN_SQNR_DB", "VERIFY.MIN_COSINE")
"""Keys that accept a mapping from outputs to numbers."""


def _figure(value: object, low: float, high: float, wanted: str) -> float:
    found = values.number(value)
    if found is None or not low <= found <= high:
        raise Wrong(f"must be {wanted}", value=value)
    return found


def _by_output(value: object, low: float, high: float, wanted: str) -> float | dict[str, float]:
    """Read one number, or {output: number}."""
    if not isinstance(value, Mapping):
        return _figure(value, low, high, f"{wanted}, or a mapping {{output: number}}")
    for name in value:
        if not isinstance(name, str) or not name:
            raise Wrong(f"has the key {short(name)}: outputs are named in text")
    return {name: _figure(one, low, high, f"{wanted} for output {short(name)}") for name, one in value.items()}


_DECIBEL = (-1000.0, 1000.0, "a number of decibel")
_COSINE = (-1.0, 1.0, "a cosine, -1 to 1")
_NUMBERS: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "number"}}

Decibel = Annotated[float, BeforeValidator(lambda value: _figure(value, *_DECIBEL)), WithJsonSchema({"type": "number"})]
DecibelByOutput = Annotated[
    float | dict[str, float],
    BeforeValidator(lambda value: _by_output(value, *_DECIBEL)),
    WithJsonSchema({"anyOf": [{"type": "number"}, _NUMBERS]}),
]
CosineByOutput = Annotated[
    float | dict[str, float],
    BeforeValidator(lambda value: _by_output(value, *_COSINE)),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": -1, "maximum": 1}, _NUMBERS]}),
]
Share = Annotated[
    float,
    BeforeValidator(lambda value: _figure(value, 0.0, 1.0, "a share, 0 to 1")),
    WithJsonSchema({"type": "number", "minimum": 0, "maximum": 1}),
]


@final
class Verification(Section):
    """VERIFY: comparison with the float model, and limits that the result must meet."""

    feeds: values.Count = key(64, "how many feeds of the data the result is compared with float on", "1 or more", "new")
    held_out: values.Ratio = key(
        0.0625,
        "share of the samples that is not calibrated on, to verify on; 64 at most, none of fewer than 64; 0: none, "
        "and the samples calibrated on are verified on",
        "0 to below 1",
        "new",
    )
    latency: values.Flag = key(True, "time both models side by side", "true, false", "new")
    min_sqnr_db: DecibelByOutput | None = key(
        None,
        "signal to noise that outputs must reach against float, in decibel; below 3 they always count as lost",
        "a number, {output: number}",
        "new",
        shown="none",
    )
    min_cosine: CosineByOutput | None = key(
        None, "cosine to the float outputs that outputs must reach", "-1 to 1, {output: number}", "new", shown="none"
    )
    levels_db: Decibel | None = key(
        None,
        "signal to noise of the outputs at each optimisation level of onnxruntime against those without any",
        "a number",
        "new",
        shown="20, where it also changes the distance from float by more than 3",
    )
    max_size_ratio: values.AboveZero | None = key(
        None, "size of the file over that of the float one, at most", "above 0", "new", shown="none"
    )
    max_latency_ratio: values.AboveZero | None = key(
        None, "time of one run over that of the float model, at most", "above 0", "new", shown="none"
    )
    min_integer: Share | None = key(
        None,
        "share of the planned ops that run in integer kernels on onnxruntime's CPU, at least",
        "0 to 1",
        "new",
        shown="none",
    )

    def problems(self) -> Iterator[Wrong]:
        """Yield the limits that cannot be checked."""
        if self.max_latency_ratio is not None and not self.latency:
            text = "cannot be judged when VERIFY.LATENCY is false: drop one of them"
            yield Wrong(text, path=("VERIFY", "MAX_LATENCY_RATIO"), value=self.max_latency_ratio)
