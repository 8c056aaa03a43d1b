"""Images as feeds: decoded with Pillow, resized, cropped, normalized, with labels of class folders or label files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from sbonnx.calib.data.labels import LABEL, LabelledFeed, batched_labels
from sbonnx.calib.data.objects import Source
from sbonnx.calib.data.readers.image_settings import ImageSettings, check_pixels
from sbonnx.calib.data.readers.media_files import MediaFiles
from sbonnx.calib.data.readers.size_inputs import size_array, size_inputs, size_notes
from sbonnx.calib.data.stored_arrays import first_line
from sbonnx.calib.data.validate import InputSpec
from sbonnx.errors import DataError, MissingReaderError
from sbonnx.metrics.boxes import ImagePlacement
from sbonnx.report.codes import Note
from sbonnx.system.input_files import check_regular

INSTALL: Final = "pip install 'sbonnx[images]'"

FORMATS: Final = ("JPEG", "PNG", "BMP", "WEBP", "TIFF", "PPM", "GIF")
"""Formats of the suffixes that are read. Pillow looks at the contents and knows more: for PostScript, it runs gs."""

DEEP_MODES: Final = ("I", "F")
"""Prefixes of Pillow's modes of more than 8 bits, whose conversion to RGB clips."""

DEEP_PIXELS: Final = re.compile(r";16[BLNRS]")
"""Names of stored pixels with 16 bits a channel, whose lower 8 bits Pillow drops."""


@dataclass(frozen=True)
class ImageInput:
    """The image input of a model.

    Attributes:
        spec: the input.
        layout: "nchw" or "nhwc".
        channels: number of channels; None: dynamic.
        size: (height, width); None for a dynamic one.
        batch: fixed batch size; 1 if it is dynamic or there is no batch axis.
    """

    spec: InputSpec
    layout: str
    channels: int | None
    size: tuple[int | None, int | None]
    batch: int


def image_input(inputs: Sequence[InputSpec], layout: str | None) -> ImageInput:
    """Return the image input of a model and its layout: the given one, else the one whose channels are 1 or 3.

    Raises:
        DataError: the model needs several inputs besides those that `size_inputs` fills, or its input is no image.
    """
    needed = [spec for spec in inputs if not spec.optional] or list(inputs)
    filled = size_inputs(needed)
    needed = [spec for spec in needed if spec not in filled]
    if len(needed) != 1:
        names = ", ".join(f"'{spec.name}'" for spec in needed)
        raise DataError(
            f"images fill one input and the model has {len(needed)} ({names}): give a Python file, data.py:f"
        )
    (spec,) = needed
    if spec.shape is None or len(spec.shape) not in (3, 4):
        raise DataError(f"input '{spec.name}' wants {spec}, which is no image (N, C, H, W) or (N, H, W, C)")
    dims: list[int | None] = [dim if isinstance(dim, int) and dim > 0 else None for dim in spec.shape]
    batch, (first, second, third) = (dims[0] if len(dims) == 4 else None), dims[-3:]
    if layout is None:
        layout = "nhwc" if third in (1, 3) and first not in (1, 3) else "nchw"
    channels, size = (first, (second, third)) if layout == "nchw" else (third, (first, second))
    if channels not in (None, 1, 3):
        raise DataError(
            f"input '{spec.name}' wants {spec}: {channels} channels in layout {layout}, and images have 1 or 3; "
            "set layout in the preprocessing, or give a Python file, data.py:f"
        )
    return ImageInput(spec, layout, channels, size, batch or 1)


class PlacedLabels(Protocol):
    """Labels that depend on the size of the image and its position in the input."""

    def labels(self, placement: ImagePlacement) -> Mapping[str, Any]:
        """Return the labels by name.

        Raises:
            DataError: they do not fit the image.
        """


@dataclass(frozen=True)
class Picture:
    """One image.

    Attributes:
        where: where it is from, for messages.
        decode: returns it in a mode of Pillow ("RGB" or "L").
        labels: its labels by name.
        boxes: its true boxes, whose labels depend on its size; None: none.
    """

    where: str
    decode: Callable[[str], Any]
    labels: Mapping[str, Any] = field(default_factory=dict)
    boxes: PlacedLabels | None = None


def open_images(files: MediaFiles, inputs: Sequence[InputSpec], settings: ImageSettings) -> Source:
    """Open a folder of images, see `open_pictures`."""

    def at(place: int) -> Picture:
        path = files.paths[place]
        label = files.labels.get(path)
        labels = {} if label is None or hasattr(label, "labels") else {LABEL: label}
        return Picture(f"'{path}'", partial(decode, path), labels, label if hasattr(label, "labels") else None)

    return open_pictures(files.name, len(files.paths), at, inputs, settings, files.notes)


def open_pictures(
    name: str,
    total: int,
    picture_at: Callable[[int], Picture],
    inputs: Sequence[InputSpec],
    settings: ImageSettings,
    notes: Sequence[Note] = (),
) -> Source:
    """Open images: one image a feed, or as many as the model's fixed batch size.

    Args:
        name: origin, for messages.
        total: number of images.
        picture_at: returns the n-th one.
        notes: one sentence each about data that is not used.

    Raises:
        DataError: Pillow is missing, the settings do not fit the model, or there are fewer images than a batch.
    """
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise MissingReaderError(f"images need the package Pillow, which is not installed: {INSTALL}") from error
    target = image_input(inputs, settings.layout)
    transform = settings.bound(target.spec, target.channels, target.size)
    sizes = size_inputs([spec for spec in inputs if not spec.optional])
    notes = (*notes, *size_notes(sizes))
    batch, count = target.batch, total // target.batch
    if not count:
        raise DataError(f"{name} holds {total} images, and a batch of the model has {batch}: add images")
    if total % batch:
        notes = (
            *notes,
            Note("data-not-used", f"the last {total % batch} images of {name} are no whole batch of {batch}: not used"),
        )

    def at(place: int) -> tuple[str, LabelledFeed]:
        pictures = [picture_at(number) for number in range(place * batch, (place + 1) * batch)]
        images, labels = [], []
        for picture in pictures:
            x, placement = transform.apply(picture.decode, picture.where)
            images.append(x.transpose(2, 0, 1) if target.layout == "nchw" else x)
            labels.append({**picture.labels, **(picture.boxes.labels(placement) if picture.boxes else {})})
        where = pictures[0].where if batch == 1 else f"{pictures[0].where} to {pictures[-1].where}"
        _check_equal([x.shape for x in images], where)
        stacked = np.stack(images) if target.spec.shape is not None and len(target.spec.shape) == 4 else images[0]
        filled = {spec.name: size_array(spec, len(images), placement.size) for spec in sizes}
        return where, LabelledFeed({target.spec.name: stacked, **filled}, batched_labels(labels))

    lengths = [batch] * count
    return Source(name, lambda: (at(place) for place in range(count)), count, at, lambda: lengths, notes=tuple(notes))


def _check_equal(shapes: Sequence[tuple[int, ...]], where: str) -> None:
    if len(set(shapes)) > 1:
        raise DataError(f"{where} have different sizes after preprocessing: set crop or resize: [height, width]")


def decode(path: Path, mode: str) -> Any:
    """Decode an image file as a PIL image in a mode, see `upright`.

    Raises:
        DataError: the file is damaged, no image, or has more than 8 bits a channel.
    """
    from PIL import Image

    try:
        check_regular(path)
        with Image.open(path, formats=FORMATS) as image:
            return upright(image, mode, f"'{path}'")
    except DataError:
        raise
    except Exception as error:  # Pillow's plugins raise OSError, ValueError, SyntaxError, struct.error, ...
        raise DataError(f"image '{path}' cannot be decoded: {reason_of(error)}; copy it again or remove it") from error


def reason_of(error: Exception) -> str:
    """Return why Pillow cannot decode an image, as a clause."""
    return "it is no image that Pillow reads" if type(error).__name__ == "UnidentifiedImageError" else first_line(error)


def upright(image: Any, mode: str, where: str) -> Any:
    """Return a PIL image in a mode ("RGB" or "L"), turned upright by its EXIF orientation.

    Transparency is dropped, as `Image.convert` does; of an animation, the first frame is read.

    Raises:
        DataError: it has more than 8 bits a channel, or too many pixels.
    """
    from PIL import ImageOps

    check_pixels(image.size[::-1], f"{where} has")
    if _is_deep(image):
        raise DataError(f"{where} has more than 8 bits a channel (mode {image.mode}): convert it to 8 bits")
    image.load()
    return ImageOps.exif_transpose(image).convert(mode)


def _is_deep(image: Any) -> bool:
    """Whether an image that is not loaded yet is stored with more than 8 bits a channel."""
    if image.mode.startswith(DEEP_MODES):
        return True
    for tile in getattr(image, "tile", ()):  # (codec, place, offset, arguments)
        arguments = tile[3] if isinstance(tile[3], tuple) else (tile[3],)
        if any(DEEP_PIXELS.search(argument) for argument in arguments if isinstance(argument, str)):
            return True
        if (
            str(tile[0]).startswith("ppm") and isinstance(arguments[-1], int) and arguments[-1] > 255
        ):  # the maximum value
            return True
    return False
