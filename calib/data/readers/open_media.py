"""Opens images, audio and texts with their preprocessing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sbonnx.calib.data.data_path import Preprocessing
from sbonnx.calib.data.objects import Source
from sbonnx.calib.data.readers.audio import open_audio
from sbonnx.calib.data.readers.image_settings import ImageSettings
from sbonnx.calib.data.readers.images import open_images
from sbonnx.calib.data.readers.media_files import MediaFiles
from sbonnx.calib.data.readers.preprocess_values import PRESETS, read_settings
from sbonnx.calib.data.readers.texts import open_texts
from sbonnx.calib.data.validate import InputSpec
from sbonnx.errors import DataError

NEEDED: Final = {
    "images": f"{', '.join(PRESETS)}, or a file",
    "audio": "a YAML file with sample_rate, or a preprocessor_config.json",
    "texts": "the tokenizer.json of the model, or a file that names it",
}
"""Preprocessing by kind of files."""


def open_media(kind: str, files: MediaFiles, inputs: Sequence[InputSpec], preprocess: Preprocessing | None) -> Source:
    """Open files of one kind.

    Raises:
        DataError: the preprocessing is missing or does not fit, or a package is not installed.
    """
    if preprocess is None:
        raise DataError(
            f"{files.name} holds {kind}, which need --preprocess (preprocess=) as for inference: "
            f"{NEEDED[kind]}; see docs/data.md"
        )
    settings = read_settings(preprocess)
    if kind == "audio":
        return open_audio(files, inputs, settings)
    if kind == "texts":
        return open_texts(files, inputs, settings)
    return open_images(files, inputs, ImageSettings.parse(settings))
