"""Preprocessing of images: checked settings, bound to the input of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from sbonnx.calib.data.readers.preprocess_values import PreprocessValues, number, whole, word
from sbonnx.calib.data.validate import InputSpec
from sbonnx.errors import DataError
from sbonnx.metrics.boxes import ImagePlacement
from sbonnx.spec import Array

Size = tuple[int, int]
"""Height and width in pixels."""

Scale = tuple[float, float]
Offset = tuple[float, float]
"""Horizontal and vertical part of a `ImagePlacement`."""

FILTERS: Final = ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")
"""Names of PIL.Image.Resampling."""

KEYS: Final = (
    "resize",
    "size",
    "interpolation",
    "crop",
    "crop_pct",
    "crop_offset",
    "fill",
    "color",
    "scale",
    "mean",
    "std",
    "layout",
    "dtype",
)
RESIZES: Final = ("model", "shorter", "letterbox", "none")
SIZE: Final = "a number of pixels or [height, width]"
MOST_PIXELS: Final = 89_478_485
"""Maximum number of pixels of an image, stored or resized: Pillow's limit for its warning of a decompression bomb."""

LIMIT: Final = 1 << 14
"""Maximum height and width in pixels that images are resized to."""


@dataclass(frozen=True)
class ImageSettings:
    """Preprocessing of images: resize, crop, (pixels * scale - mean) / std, layout, type.

    Attributes:
        resize: "model": stretch to the size of the input; "shorter": the shorter side to that size / `crop_pct`;
            "letterbox": fit into that size and pad with `fill`; "none"; a shorter side; or (height, width).
        size: size of the input where the model's is dynamic.
        interpolation: filter of Pillow, antialiased.
        crop: size of the centre crop; "model": that of the input; None: no crop.
        crop_pct: see `resize`.
        crop_offset: rounding of half pixels of the crop's corner: "even" (torchvision) or "floor" (transformers).
        fill: value of padding pixels, 0 to 255.
        color: order of channels; None: rgb, or gray for one channel.
        scale, mean, std: see above; one value a channel, or one for all.
        layout: None: by the shape of the input.
        dtype: element type; None: that of the input.
    """

    resize: str | int | Size = "model"
    size: Size | None = None
    interpolation: str = "bilinear"
    crop: Size | Literal["model"] | None = None
    crop_pct: float = 1.0
    crop_offset: str = "even"
    fill: int = 114
    color: str | None = None
    scale: float = 1.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    layout: str | None = None
    dtype: np.dtype[Any] | None = None

    @staticmethod
    def parse(settings: PreprocessValues) -> ImageSettings:
        """Check settings.

        Raises:
            DataError: an unknown key or value, or no `scale`.
        """
        settings.check_keys(KEYS, "images")
        if settings.values.get("scale") is None:
            raise DataError(f"{settings.where} has no scale: set scale: 1/255 for pixels from 0 to 1, 1 for 0 to 255")
        default = ImageSettings()
        value = settings.value
        return ImageSettings(
            resize=value("resize", default.resize, _resize, f"{', '.join(RESIZES)}, or {SIZE}"),
            size=value("size", None, _size, SIZE),
            interpolation=value("interpolation", default.interpolation, word(*FILTERS), f"one of {', '.join(FILTERS)}"),
            crop=value("crop", None, _crop, f"model, or {SIZE}"),
            crop_pct=value("crop_pct", default.crop_pct, _share, "a number above 0, up to 1"),
            crop_offset=value("crop_offset", default.crop_offset, word("even", "floor"), "even or floor"),
            fill=value("fill", default.fill, _byte, "an integer from 0 to 255"),
            color=value("color", None, word("rgb", "bgr", "gray"), "rgb, bgr or gray"),
            scale=value("scale", default.scale, number, "a number, or a fraction such as 1/255"),
            mean=value("mean", default.mean, _channels, "a number or a list of one a channel"),
            std=value("std", default.std, _divisors, "a number other than 0 or a list of one a channel"),
            layout=value("layout", None, word("nchw", "nhwc"), "nchw or nhwc"),
            dtype=value("dtype", None, _dtype, "a type of numpy, such as float32"),
        )

    def bound(self, spec: InputSpec, channels: int | None, size: tuple[int | None, int | None]) -> ImageTransform:
        """Return the transform for an input of a model.

        Args:
            channels: channels of the input; None: dynamic.
            size: height and width of the input; None: dynamic.

        Raises:
            DataError: the settings do not fit the input, or need a size where it is dynamic.
        """
        color = self.color or ("gray" if channels == 1 else "rgb")
        count = 1 if color == "gray" else 3
        what = f"input '{spec.name}' wants {spec}"
        if channels not in (None, count):
            raise DataError(f"{what}, and the preprocessing gives {count} channels ({color}): set color")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, count):
                raise DataError(
                    f"{name} of the preprocessing has {len(values)} values and images have {count} channels"
                )
        dtype = self.dtype or spec.dtype or np.dtype(np.float32)
        if dtype.kind != "f" and (self.scale != 1 or any(self.mean) or any(value != 1 for value in self.std)):
            raise DataError(f"{what}: pixels in {dtype} are not scaled; set scale: 1 and no mean and std")
        target = self._target(size, what)
        final = self._final(target)
        if final is not None and any(want not in (None, have) for want, have in zip(size, final, strict=True)):
            raise DataError(
                f"{what}, and the preprocessing gives {final[0]} x {final[1]} pixels: set crop or resize to the input's"
            )
        return ImageTransform(self, target, "L" if color == "gray" else "RGB", color == "bgr", dtype)

    def _target(self, size: tuple[int | None, int | None], what: str) -> Size | None:
        """Return the size of the input; None if no step needs it."""
        height, width = (have or (self.size[axis] if self.size else None) for axis, have in enumerate(size))
        if height is not None and width is not None:
            return height, width
        if self.crop == "model" or self.resize in ("model", "shorter", "letterbox"):
            raise DataError(
                f"{what}, whose height and width are dynamic: set size: [height, width] in the preprocessing, such as "
                "a YAML file with the lines 'preset: yolo' and 'size: [640, 640]'"
            )
        return None

    def _final(self, target: Size | None) -> Size | None:
        """Return the size of every image after preprocessing; None if it depends on the image."""
        if self.crop is not None:
            return target if self.crop == "model" else self.crop
        if self.resize in ("model", "letterbox"):
            return target
        return self.resize if isinstance(self.resize, tuple) else None


@dataclass(frozen=True)
class ImageTransform:
    """Preprocessing of one image for one input.

    Attributes:
        settings: the settings.
        target: height and width of the input; None if no step needs them.
        mode: mode of Pillow, "RGB" or "L".
        reverse: reverse the channels (bgr).
        dtype: type of the result.
    """

    settings: ImageSettings
    target: Size | None
    mode: str
    reverse: bool
    dtype: np.dtype[Any]

    def apply(self, decode: Callable[[str], Any], where: str) -> tuple[Array, ImagePlacement]:
        """Return the preprocessed image, shape (height, width, channels), and its position there.

        Args:
            decode: returns the image in a mode of Pillow.
            where: names it in messages.

        Raises:
            DataError: it becomes too large.
        """
        settings = self.settings
        picture = decode(self.mode)
        image, scale, offset = self._resized(picture, where)
        crop = self.target if settings.crop == "model" else settings.crop
        if crop is not None:
            check_pixels(crop, f"{where} is cropped to")
            image, corner = center_crop(image, crop, round if settings.crop_offset == "even" else int)
            offset = (offset[0] - corner[0], offset[1] - corner[1])
        placement = ImagePlacement(scale, offset, (picture.height, picture.width), (image.height, image.width))
        x = np.asarray(image, np.uint8)
        x = x[..., None] if x.ndim == 2 else x[..., ::-1] if self.reverse else x
        if self.dtype.kind != "f":
            return x.astype(self.dtype), placement
        mean, std = np.array(settings.mean, np.float32), np.array(settings.std, np.float32)
        y: Array = (x.astype(np.float32) * np.float32(settings.scale) - mean) / std
        return y.astype(self.dtype, copy=False), placement

    def _resized(self, image: Any, where: str) -> tuple[Any, Scale, Offset]:
        """Return the image after resizing, its scale and its offset."""
        settings = self.settings
        if settings.resize == "none":
            return image, (1.0, 1.0), (0.0, 0.0)
        size = self._size_of(image)
        check_pixels(size, f"{where} of {image.height} x {image.width} pixels is resized to")
        if settings.resize == "letterbox":
            return letterbox(image, size, settings.fill, self._to)
        return self._to(image, size), _scale(image, size), (0.0, 0.0)

    def _size_of(self, image: Any) -> Size:
        """Return the size to which an image is resized."""
        settings, target = self.settings, self.target
        if isinstance(settings.resize, int):
            return shorter_side(image, settings.resize)
        if isinstance(settings.resize, tuple):
            return settings.resize
        assert target is not None
        if settings.resize in ("letterbox", "model"):
            return target
        height, width = (int(side / settings.crop_pct) for side in target)
        if height == width:
            return shorter_side(image, height)
        ratio = max(height / image.height, width / image.width)
        return max(height, round(image.height * ratio)), max(width, round(image.width * ratio))

    def _to(self, image: Any, size: Size) -> Any:
        from PIL import Image

        height, width = size
        if (image.height, image.width) == size:
            return image
        return image.resize((width, height), Image.Resampling[self.settings.interpolation.upper()])


def check_pixels(size: Size, what: str) -> None:
    """Check the number of pixels of an image.

    Args:
        what: beginning of the message.

    Raises:
        DataError: it has more than `MOST_PIXELS`.
    """
    height, width = size
    if height * width > MOST_PIXELS:
        raise DataError(
            f"{what} {height} x {width} pixels, and at most {MOST_PIXELS} are decoded: make it smaller, or remove it"
        )


def shorter_side(image: Any, side: int) -> Size:
    """Return the size with `side` as the shorter side and the same aspect ratio, rounded down as torchvision does."""
    height, width = image.height, image.width
    return (side, int(side * width / height)) if height <= width else (int(side * height / width), side)


def _scale(image: Any, size: Size) -> Scale:
    return size[1] / image.width, size[0] / image.height


def center_crop(image: Any, size: Size, rounded: Callable[[float], int] = round) -> tuple[Any, Offset]:
    """Crop the centre of an image; one that is smaller is padded with zeros first. Return also the corner of the crop.

    Source: torchvision.transforms.functional.center_crop, whose offsets are rounded half to even.
    """
    height, width = max(image.height, size[0]), max(image.width, size[1])
    before = (width - image.width) // 2, (height - image.height) // 2
    if (height, width) != (image.height, image.width):
        left, top = before
        image = image.crop((-left, -top, width - left, height - top))  # Pillow fills with zeros
    top, left = rounded((height - size[0]) / 2), rounded((width - size[1]) / 2)
    return image.crop((left, top, left + size[1], top + size[0])), (left - before[0], top - before[1])


def letterbox(image: Any, size: Size, fill: int, resized: Callable[[Any, Size], Any]) -> tuple[Any, Scale, Offset]:
    """Fit an image into `size` with its aspect ratio and pad it on both sides. Return also its scale and offset.

    Source: ultralytics.data.augment.LetterBox with auto=False: ratio, rounding and placement.
    """
    from PIL import Image

    ratio = min(size[0] / image.height, size[1] / image.width)
    height, width = max(1, round(image.height * ratio)), max(1, round(image.width * ratio))
    canvas = Image.new(image.mode, (size[1], size[0]), fill if image.mode == "L" else (fill,) * 3)
    top, left = round((size[0] - height) / 2 - 0.1), round((size[1] - width) / 2 - 0.1)
    canvas.paste(resized(image, (height, width)), (left, top))
    return canvas, _scale(image, (height, width)), (left, top)


def _size(value: Any) -> Size:
    height, width = (value, value) if isinstance(value, int) else value
    if max(whole(height), whole(width)) > LIMIT or height * width > MOST_PIXELS:
        raise ValueError("too large")
    return height, width


def _resize(value: Any) -> str | int | Size:
    if isinstance(value, str):
        return word(*RESIZES)(value)
    return _size(value)[0] if isinstance(value, int) else _size(value)


def _crop(value: Any) -> Size | Literal["model"] | None:
    if isinstance(value, str):
        return None if word("model", "none")(value) == "none" else "model"
    return _size(value)


def _share(value: Any) -> float:
    share = number(value)
    if not 0.05 <= share <= 1:
        raise ValueError("out of range")
    return share


def _byte(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 255:
        raise ValueError("no byte")
    return value


def _channels(value: Any) -> tuple[float, ...]:
    return tuple(number(channel) for channel in value) if isinstance(value, (list, tuple)) else (number(value),)


def _divisors(value: Any) -> tuple[float, ...]:
    divisors = _channels(value)
    if 0 in divisors or not divisors:
        raise ValueError("a division by 0")
    return divisors


def _dtype(value: Any) -> np.dtype[Any]:
    dtype = np.dtype(str(value))
    if dtype.kind not in "fiu":
        raise ValueError("no number")
    return dtype
