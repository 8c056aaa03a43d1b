"""Settings of a preprocessing: presets, YAML and JSON files, preprocessor_config.json; checked values by key."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml

from sbonnx.calib.data.data_path import Preprocessing
from sbonnx.calib.data.readers.huggingface import CONFIG, from_config, is_config
from sbonnx.errors import DataError
from sbonnx.system.input_files import read_regular

T = TypeVar("T")

IMAGENET_MEAN: Final = (0.485, 0.456, 0.406)
IMAGENET_STD: Final = (0.229, 0.224, 0.225)

PRESETS: Final[dict[str, dict[str, Any]]] = {
    "imagenet": {
        "resize": "shorter",
        "crop": "model",
        "crop_pct": 0.875,
        "scale": 1 / 255,
        "mean": IMAGENET_MEAN,
        "std": IMAGENET_STD,
    },
    "inception": {
        "resize": "shorter",
        "crop": "model",
        "crop_pct": 0.875,
        "scale": 1 / 255,
        "mean": 0.5,
        "std": 0.5,
    },
    "caffe": {
        "resize": "shorter",
        "crop": "model",
        "crop_pct": 0.875,
        "color": "bgr",
        "scale": 1,
        "mean": (103.939, 116.779, 123.68),
    },
    "yolo": {"resize": "letterbox", "fill": 114, "scale": 1 / 255},
    "unit": {"resize": "model", "scale": 1 / 255},
    "raw": {"resize": "model", "scale": 1},
}
"""Image preprocessing by name.

imagenet: torchvision's reference for classification; inception: pixels -1 to 1 (Keras mode "tf", timm); caffe: Keras
mode "caffe"; yolo: Ultralytics; unit, raw: the whole image stretched, pixels 0 to 1 or 0 to 255.
"""

LARGEST: Final = 16 << 20
"""Maximum size in bytes of a settings file."""

TOKENIZER: Final = "tokenizer.json"


@dataclass(frozen=True)
class PreprocessValues:
    """Values of a preprocessing by key, before they are checked.

    Attributes:
        values: values by key.
        where: their origin, for messages.
        folder: folder that paths among the values are relative to.
    """

    values: Mapping[str, Any]
    where: str
    folder: Path = Path()

    def check_keys(self, known: Iterable[str], kind: str) -> None:
        """Check that all keys are known.

        Raises:
            DataError: a key is not.
        """
        names = sorted(known)
        for key in self.values:
            if key not in names:
                close = get_close_matches(str(key), names, n=1)
                hint = f"did you mean '{close[0]}'? " if close else ""
                raise DataError(f"{self.where} has a key '{key}': {hint}for {kind} there are {', '.join(names)}")

    def value(self, key: str, default: T, read: Callable[[Any], T], wanted: str) -> T:
        """Return the checked value of a key.

        Args:
            read: returns the value in its type, or raises ValueError, TypeError or KeyError.
            wanted: what the value must be, for messages.

        Raises:
            DataError: the value is not what is wanted.
        """
        if self.values.get(key) is None:
            return default
        try:
            return read(self.values[key])
        except (ValueError, TypeError, KeyError, ZeroDivisionError, OverflowError) as error:
            raise DataError(f"{self.where}: {key} must be {wanted}, got {self.values[key]!r:.60}") from error


def number(value: Any) -> float:
    """Return a finite number; text may be a fraction such as "1/255"."""
    if isinstance(value, bool):
        raise ValueError("a boolean")
    if isinstance(value, str):
        above, slash, below = value.partition("/")
        parsed = float(above) / (float(below) if slash else 1.0)
    else:
        parsed = float(value)
    if not isfinite(parsed):
        raise ValueError("not finite")
    return parsed


def whole(value: Any) -> int:
    """Return an integer above 0."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
        raise ValueError("no positive integer")
    return value


def truth(value: Any) -> bool:
    """Return a boolean."""
    if not isinstance(value, bool):
        raise ValueError("no boolean")
    return value


def word(*words: str) -> Callable[[Any], str]:
    """Return a reader of one of several words, in lower case."""

    def read(value: Any) -> str:
        text = str(value).lower()
        if text not in words:
            raise ValueError(text)
        return text

    return read


def read_settings(preprocess: Preprocessing) -> PreprocessValues:
    """Read the settings of a preprocessing.

    Args:
        preprocess: a name in `PRESETS`, a mapping, or a path: YAML or JSON with the keys of docs/data.md, a
            preprocessor_config.json of Hugging Face, a tokenizer.json, or a folder with one of the last two.

    Raises:
        DataError: there is no such preset or file, or the file cannot be read as settings.
    """
    if isinstance(preprocess, Mapping):
        return _of_mapping(dict(preprocess), "the preprocessing", Path())
    if isinstance(preprocess, str) and preprocess in PRESETS:
        return PreprocessValues(PRESETS[preprocess], f"the preset '{preprocess}'")
    path = Path(preprocess)
    if os.path.isdir(path):
        file = next((path / name for name in (CONFIG, TOKENIZER) if (path / name).is_file()), None)
        if file is None:
            raise DataError(f"folder '{path}' has no {CONFIG} or {TOKENIZER}: name a file with settings, or a preset")
        path = file
    if path.name == TOKENIZER:
        return PreprocessValues({"tokenizer": path.name}, f"'{path}'", path.parent)
    try:
        text = read_regular(path, LARGEST).decode("utf-8")
        values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except FileNotFoundError as error:
        raise DataError(
            f"'{preprocess}' is no preprocessing: give {', '.join(PRESETS)}, or an existing YAML or JSON file"
        ) from error
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"'{path}' is no readable YAML or JSON: {reason}") from error
    if not isinstance(values, dict):
        raise DataError(f"'{path}' must hold keys and values, such as scale: 1/255; see docs/data.md")
    return _of_mapping(values, f"'{path}'", path.parent)


def yaml_values(path: Path) -> Mapping[Any, Any]:
    """Return the keys and values of a YAML file; none if it holds something else.

    Raises:
        DataError: it cannot be read.
    """
    try:
        values = yaml.safe_load(read_regular(path, LARGEST).decode("utf-8"))
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise DataError(f"'{path}' is no readable YAML: {' '.join(str(error).split())[:200]}") from error
    return values if isinstance(values, dict) else {}


def _of_mapping(values: dict[str, Any], where: str, folder: Path) -> PreprocessValues:
    if is_config(values):
        values = from_config(values, where)
    preset = values.pop("preset", None)
    if preset is not None:
        if not isinstance(preset, str) or preset not in PRESETS:
            raise DataError(f"{where}: preset must be one of {', '.join(PRESETS)}, got {preset!r:.60}")
        values = {**PRESETS[preset], **values}
    return PreprocessValues(values, where, folder)
