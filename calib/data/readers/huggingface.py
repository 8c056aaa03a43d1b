"""Image preprocessing of Hugging Face: preprocessor_config.json as settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sbonnx.errors import DataError

CONFIG: Final = "preprocessor_config.json"

FILTERS: Final = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
"""Interpolation by the number of PIL.Image.Resampling, which the key `resample` holds."""

SHORTEST: Final = ("CLIP", "ConvNext", "LeViT", "Levit", "MobileNetV1", "MobileNetV2", "MobileViT", "Bit", "PoolFormer")
"""Processors that read an integer `size` as the shorter side; all others stretch to a square.

Source: `default_to_square=False` in the image processors of transformers.
"""

FLIPPED: Final = ("MobileViT",)
"""Processors that flip the order of channels unless the file says otherwise."""

UNNORMALIZED: Final = ("MobileViT",)
"""Processors that do not normalize unless the file says otherwise."""


def is_config(values: Mapping[str, Any]) -> bool:
    """Return whether a JSON file is the configuration of an image processor."""
    return any(
        key in values for key in ("image_processor_type", "feature_extractor_type", "do_normalize", "do_rescale")
    )


def from_config(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Translate a preprocessor_config.json to settings of images.

    Raises:
        DataError: it holds a step that has no counterpart here, a value of a wrong type, or no image processor.
    """
    try:
        return _from_config(values, where)
    except DataError:
        raise
    except (TypeError, ValueError, ArithmeticError) as error:
        raise DataError(f"{where} has a value of a wrong type: {error}") from error


def _from_config(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = str(values.get("image_processor_type") or values.get("feature_extractor_type") or "")
    if "sampling_rate" in values:
        return {"sample_rate": values["sampling_rate"], "normalize": bool(values.get("do_normalize"))}
    settings: dict[str, Any] = {"color": "rgb", "scale": 1, "crop_offset": "floor"}
    if values.get("do_resize", True):
        settings |= _resize(values, kind, where)
    else:
        settings["resize"] = "none"
    if values.get("do_center_crop"):
        size = values.get("crop_size")
        settings["crop"] = [size.get("height"), size.get("width")] if isinstance(size, Mapping) else size
    if values.get("do_rescale", True):
        settings["scale"] = values.get("rescale_factor", 1 / 255)
    if values.get("do_normalize", not kind.startswith(UNNORMALIZED)):
        settings |= {"mean": values.get("image_mean"), "std": values.get("image_std")}
    if values.get("rescale_offset") or values.get("include_top"):
        settings |= _efficientnet(values, settings, where)
    if values.get("do_flip_channel_order", kind.startswith(FLIPPED)):
        settings["color"] = "bgr"
    if values.get("do_pad"):
        raise DataError(f"{where}: do_pad has no counterpart here: write the steps as YAML, or give a Python file")
    return settings


def _efficientnet(values: Mapping[str, Any], found: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return mean and std of EfficientNet's two further steps: minus 1 after scaling; division by std once more."""
    offset = 1.0 if values.get("rescale_offset") else 0.0
    try:
        mean, std = (
            [float(value) for value in found.get(key) or [default]] for key, default in (("mean", 0), ("std", 1))
        )
        again = [float(value) for value in values["image_std"]] if values.get("include_top") else [1.0]
    except (TypeError, ValueError, KeyError) as error:
        raise DataError(f"{where}: image_mean and image_std must be lists of numbers") from error
    count = max(len(std), len(again))
    std, again = (numbers if len(numbers) == count else numbers * count for numbers in (std, again))
    return {"mean": [value + offset for value in mean], "std": [a * b for a, b in zip(std, again, strict=True)]}


def _resize(values: Mapping[str, Any], kind: str, where: str) -> dict[str, Any]:
    size, resample = values.get("size"), values.get("resample", 2)
    settings: dict[str, Any] = {"interpolation": FILTERS.get(resample, resample)}
    if isinstance(size, int):
        size = {"shortest_edge": size} if kind.startswith(SHORTEST) else {"height": size, "width": size}
    if not isinstance(size, Mapping):
        raise DataError(f"{where}: size must be an integer or a mapping, got {size!r:.60}")
    keys = set(size)
    if keys == {"height", "width"}:
        return {**settings, "resize": [size["height"], size["width"]]}
    if keys != {"shortest_edge"}:
        raise DataError(f"{where}: size with {', '.join(sorted(keys))} has no counterpart here: write it as YAML")
    edge = size["shortest_edge"]
    if not isinstance(edge, int) or isinstance(edge, bool):
        raise DataError(f"{where}: shortest_edge must be an integer, got {edge!r:.60}")
    if kind.startswith("ConvNext"):
        if edge >= 384:
            return {**settings, "resize": [edge, edge]}
        pct = values.get("crop_pct") or 224 / 256
        return {**settings, "resize": int(edge / pct), "crop": [edge, edge]}
    if kind.lower().startswith("levit"):
        edge = int(256 / 224 * edge)
    elif kind.startswith("PoolFormer") and values.get("crop_pct"):
        edge = int(edge / values["crop_pct"])
    return {**settings, "resize": edge}
