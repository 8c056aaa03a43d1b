"""Images: preprocessing against definitions written out with Pillow and numpy; labels; files that are not right."""

from __future__ import annotations

import json
import struct
import tracemalloc
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sbonnx.calib.data import DataPath, InputSpec
from sbonnx.calib.data.dataset import Dataset, read
from sbonnx.errors import DataError
from sbonnx.spec import Array

Image = pytest.importorskip("PIL.Image")

F32 = np.dtype(np.float32)
MEAN, STD = np.array([0.485, 0.456, 0.406], np.float32), np.array([0.229, 0.224, 0.225], np.float32)


def f32(values: list[float]) -> Array:
    found: Array = np.array(values, np.float32)
    return found


def nchw(height: Any = 32, width: Any = 32, channels: Any = 3, batch: Any = "N") -> tuple[InputSpec, ...]:
    return (InputSpec("x", F32, (batch, channels, height, width)),)


def picture(height: int = 45, width: int = 70, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (height // 8, width // 8, 3), np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def only(data: Dataset) -> Array:
    (feed,) = data
    return feed["x"]


def pixels(image: Any) -> Array:
    return np.asarray(image, np.float32)


def imagenet(image: Any, size: int) -> Array:
    """torchvision: Resize(int(size / 0.875)), CenterCrop(size), ToTensor(), Normalize(mean, std)."""
    edge, (width, height) = int(size / 0.875), image.size
    new = (edge, int(edge * height / width)) if width <= height else (int(edge * width / height), edge)
    image = image.resize(new, Image.Resampling.BILINEAR)
    left, top = round((new[0] - size) / 2), round((new[1] - size) / 2)
    x = pixels(image)[top : top + size, left : left + size]
    found: Array = ((x / 255 - MEAN) / STD).transpose(2, 0, 1)
    return found


def yolo(image: Any, size: tuple[int, int]) -> Array:
    """Ultralytics: LetterBox(size, auto=False), RGB, / 255."""
    ratio = min(size[0] / image.height, size[1] / image.width)
    new = round(image.width * ratio), round(image.height * ratio)
    x = np.full((*size, 3), 114, np.float32)
    top, left = round((size[0] - new[1]) / 2 - 0.1), round((size[1] - new[0]) / 2 - 0.1)
    x[top : top + new[1], left : left + new[0]] = pixels(image.resize(new, Image.Resampling.BILINEAR))
    found: Array = (x / 255).transpose(2, 0, 1)
    return found


@pytest.mark.parametrize("size", [(45, 70), (71, 43), (20, 20)])
def test_presets_are_their_definitions(size: tuple[int, int], tmp_path: Path) -> None:
    image = picture(*size)
    image.save(tmp_path / "a.png")
    stretched = pixels(image.resize((32, 32), Image.Resampling.BILINEAR))
    plain = imagenet(image, 32) * STD[:, None, None] + MEAN[:, None, None]  # pixels 0 to 1
    wanted = {
        "imagenet": imagenet(image, 32),
        "inception": plain * 2 - 1,
        "caffe": plain[::-1] * 255 - f32([103.939, 116.779, 123.68])[:, None, None],
        "yolo": yolo(image, (32, 32)),
        "unit": stretched.transpose(2, 0, 1) / 255,
        "raw": stretched.transpose(2, 0, 1),
    }
    for preset, x in wanted.items():
        found = only(read(DataPath(tmp_path, preset), nchw()))
        assert found.shape == (1, 3, 32, 32) and found.dtype == np.float32
        np.testing.assert_allclose(found[0], x, atol=1e-3 if preset in ("caffe", "raw") else 1e-5)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"scale": 1, "resize": "none"}, pixels),
        ({"scale": "1/255", "color": "bgr", "mean": [0.1, 0.2, 0.3], "std": 2, "resize": "none"},
         lambda im: (pixels(im)[..., ::-1] / 255 - f32([0.1, 0.2, 0.3])) / 2),
        ({"scale": 1, "resize": [24, 40], "interpolation": "bicubic"},
         lambda im: pixels(im.resize((40, 24), Image.Resampling.BICUBIC))),
        ({"scale": 1, "resize": 30, "interpolation": "nearest"},
         lambda im: pixels(im.resize((46, 30), Image.Resampling.NEAREST))),
        ({"scale": 1, "resize": "none", "crop": [20, 31]}, lambda im: pixels(im)[12:32, 20:51]),
        ({"scale": 1, "resize": "none", "crop": [20, 31], "crop_offset": "floor"}, lambda im: pixels(im)[12:32, 19:50]),
        ({"scale": 1, "resize": "none", "crop": [49, 70]}, lambda im: np.pad(pixels(im), ((2, 2), (0, 0), (0, 0)))),
        ({"preset": "yolo", "size": [48, 40], "fill": 0, "scale": 1},
         lambda im: np.pad(pixels(im.resize((40, 26), Image.Resampling.BILINEAR)), ((11, 11), (0, 0), (0, 0)))),
    ],
)  # fmt: skip
def test_settings_are_their_definitions(settings: Mapping[str, Any], wanted: Any, tmp_path: Path) -> None:
    image = picture()
    image.save(tmp_path / "a.png")
    found = only(read(DataPath(tmp_path, settings), nchw("H", "W")))
    np.testing.assert_allclose(found[0], wanted(image).transpose(2, 0, 1), atol=1e-4)


def test_layouts_types_and_colors_follow_the_input(tmp_path: Path) -> None:
    image = picture(32, 32)
    image.save(tmp_path / "a.png")
    x = np.asarray(image)
    raw = DataPath(tmp_path, "raw")
    u8 = np.dtype(np.uint8)
    assert np.array_equal(only(read(raw, (InputSpec("x", u8, ("N", 32, 32, 3)),)))[0], x)
    assert np.array_equal(only(read(raw, (InputSpec("x", u8, (3, 32, 32)),))), x.transpose(2, 0, 1))
    gray = only(read(raw, nchw(channels=1)))
    assert gray.shape == (1, 1, 32, 32) and np.array_equal(gray[0, 0], pixels(image.convert("L")))
    half = only(read(DataPath(tmp_path, "unit"), (InputSpec("x", np.dtype(np.float16), ("N", 3, 32, 32)),)))
    assert half.dtype == np.float16
    with pytest.raises(DataError, match=r"pixels in uint8 are not scaled; set scale: 1"):
        read(DataPath(tmp_path, "unit"), (InputSpec("x", u8, ("N", 32, 32, 3)),))


def test_modes_and_orientation(tmp_path: Path) -> None:
    """Greyscale, palette, transparency and CMYK become RGB as Pillow converts them; EXIF turns the image upright."""
    image = picture(32, 32)
    for mode in ("L", "P", "RGBA", "LA", "CMYK", "1"):
        path = tmp_path / ("a.tif" if mode == "CMYK" else "a.png")
        image.convert(mode).save(path)
        found = only(read(DataPath(path, "raw"), nchw()))
        with Image.open(path) as stored:
            assert np.array_equal(found[0], pixels(stored.convert("RGB")).transpose(2, 0, 1)), mode
        path.unlink()
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: the stored image is rotated by 90 degrees counterclockwise
    image.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "b.png", exif=exif)
    assert np.array_equal(only(read(DataPath(tmp_path / "b.png", "raw"), nchw()))[0], pixels(image).transpose(2, 0, 1))
    Image.fromarray(np.zeros((32, 32), np.uint16)).save(tmp_path / "c.png")
    with pytest.raises(DataError, match=r"c\.png' has more than 8 bits a channel \(mode I;16\)"):
        read(DataPath(tmp_path / "c.png", "raw"), nchw())


def test_labels_of_class_folders_and_files(tmp_path: Path) -> None:
    for name in ("dog/10.png", "dog/9.png", "cat/1.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        picture(32, 32).save(tmp_path / name)
    (tmp_path / "README.txt").write_text("from the farm")
    (tmp_path / "cat" / "notes.md").write_text("")

    def labels(batch: Any = "N") -> list[Any]:
        data = read(DataPath(tmp_path, "raw"), nchw(batch=batch))
        shown = (
            (Path(where.strip("'")).name, {key: value for key, value in labelled.labels.items() if key != "categories"})
            for where, labelled in data.labelled()
        )
        return list(shown)

    rows = [row for _, row in read(DataPath(tmp_path, "raw"), nchw()).labelled()]
    assert {row.labels["categories"][0].names for row in rows} == {("cat", "dog")}
    assert labels() == [("1.png", {"label": [0]}), ("9.png", {"label": [1]}), ("10.png", {"label": [1]})]
    data = read(DataPath(tmp_path, "raw"), nchw(batch=2))
    assert len(data) == 1 and [x["x"].shape for x in data] == [(2, 3, 32, 32)]
    assert [list(one.labels["label"]) for _, one in data.labelled()] == [[0, 1]]
    ignored, rest = data.notes
    assert "1 file is not of images and ignored, such as 'notes.md'" in ignored
    assert rest == f"the last 1 images of folder '{tmp_path}' are no whole batch of 2: not used"
    (tmp_path / "labels.csv").write_text("file,label\ncat/1.png,tabby\ndog/9.png,poodle\n")
    assert labels() == [("1.png", {"label": [1]}), ("9.png", {"label": [0]}), ("10.png", {})]
    (tmp_path / "labels.csv").unlink()
    (tmp_path / "labels.json").write_text(json.dumps({"cat/1.png": {"boxes": [[0, 0, 4, 4]]}, "dog/9.png": 7}))
    assert labels()[:2] == [("1.png", {"label": [{"boxes": [[0, 0, 4, 4]]}]}), ("9.png", {"label": [7]})]
    for text, says in (
        ("[1]", "must be an object of labels by file name"),
        ('{"a": 1, "a": 2}', "it has a name twice"),
        ('{"a": 1, "./a": 2}', "two labels for 'a'"),
        ("{", "holds no labels"),
    ):
        (tmp_path / "labels.json").write_text(text)
        with pytest.raises(DataError, match=says):
            labels()
    (tmp_path / "labels.json").unlink()
    (tmp_path / "labels.csv").write_text("cat/1.png,1,2\n")
    with pytest.raises(DataError, match="a row has 3 cells and needs 2, file and label"):
        labels()


@pytest.mark.parametrize(
    ("settings", "inputs", "says"),
    [
        (None, nchw(), r"holds images, which need --preprocess \(preprocess=\) as for inference: imagenet, "),
        ("imagnet", nchw(), r"'imagnet' is no preprocessing: give imagenet, inception"),
        ({"scale": 1, "men": 0}, nchw(), r"a key 'men': did you mean 'mean'\?"),
        ({"mean": 0}, nchw(), r"has no scale: set scale: 1/255 for pixels from 0 to 1, 1 for 0 to 255"),
        ({"scale": "1/0"}, nchw(), r"scale must be a number, or a fraction such as 1/255, got '1/0'"),
        ({"scale": 1, "std": [1, 0, 1]}, nchw(), r"std must be a number other than 0"),
        ({"scale": 1, "mean": [1, 2]}, nchw(), r"mean of the preprocessing has 2 values and images have 3 channels"),
        ({"scale": 1, "resize": [64, 64]}, nchw(), r"gives 64 x 64 pixels: set crop or resize to the input's"),
        ({"scale": 1, "resize": "big"}, nchw(), r"resize must be model, shorter, letterbox, none, or a number"),
        ({"scale": 1, "color": "gray"}, nchw(), r"gives 1 channels \(gray\): set color"),
        ({"preset": "x"}, nchw(), r"preset must be one of imagenet"),
        ("imagenet", nchw("H", "W"), r"whose height and width are dynamic: set size: \[height, width\]"),
        ("imagenet", nchw(channels=4), r"4 channels in layout nchw, and images have 1 or 3"),
        ("imagenet", (*nchw(), InputSpec("s", F32, (1,))), r"images fill one input and the model has 2 \('x', 's'\)"),
        ("imagenet", (InputSpec("x", F32, ("N", 5)),), r"which is no image \(N, C, H, W\) or \(N, H, W, C\)"),
        ("imagenet", nchw(batch=4), r"holds 1 images, and a batch of the model has 4"),
    ],
)  # fmt: skip
def test_wrong_settings(settings: Any, inputs: Any, says: str, tmp_path: Path) -> None:
    picture().save(tmp_path / "a.png")
    with pytest.raises(DataError, match=says) as caught:
        list(read(DataPath(tmp_path, settings), inputs))
    assert "\n" not in str(caught.value)


def test_wrong_files(tmp_path: Path) -> None:
    picture().save(tmp_path / "a.jpg")
    whole = (tmp_path / "a.jpg").read_bytes()
    for content, says in (
        (whole[: len(whole) // 2], r"a\.jpg' cannot be decoded: .*truncated"),
        (b"", r"a\.jpg' cannot be decoded: it is no image that Pillow reads"),
        (b"P6 9999999 9999999 255 ", r"cannot be decoded"),
    ):
        (tmp_path / "a.jpg").write_bytes(content)
        with pytest.raises(DataError, match=says) as caught:
            read(DataPath(tmp_path, "unit"), nchw())
        assert "\n" not in str(caught.value)
    for other, says in (
        ("b.npz", r"mixes images and \.npz: keep one kind"),
        ("b.wav", r"mixes audio and images"),
        ("cat/b.png", r"holds images itself and in subfolders \('cat'\)"),
    ):
        (tmp_path / other).parent.mkdir(exist_ok=True)
        (tmp_path / other).write_bytes(b"x")
        with pytest.raises(DataError, match=says):
            read(DataPath(tmp_path, "unit"), nchw())
        (tmp_path / other).unlink()
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty' is empty: put \.npz files \(one feed each\) or images in it"):
        read(DataPath(tmp_path / "empty", "unit"), nchw())
    np.save(tmp_path / "empty" / "x.npy", np.zeros((1, 3, 32, 32), np.float32))
    data = read(DataPath(tmp_path / "empty", "unit"), nchw())
    assert data.notes == (f"the preprocessing is not applied to '{tmp_path / 'empty'}', which holds arrays",)


CONFIGS: list[dict[str, Any]] = [
    {"image_processor_type": "ViTImageProcessor", "size": {"height": 32, "width": 32}, "resample": 2},
    {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 40}, "resample": 3, "do_center_crop": True,
      "crop_size": {"height": 31, "width": 31}},
    {"feature_extractor_type": "ViTFeatureExtractor", "size": 32, "resample": 2},
    {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 32}, "crop_pct": 0.875},
    {"image_processor_type": "LevitImageProcessor", "size": {"shortest_edge": 32}, "do_center_crop": True,
      "crop_size": {"height": 32, "width": 32}},
    {"image_processor_type": "EfficientNetImageProcessor", "size": {"height": 32, "width": 32}, "resample": 0,
      "include_top": True, "rescale_offset": True},
    {"image_processor_type": "MobileViTImageProcessor", "size": {"shortest_edge": 32}, "do_center_crop": True,
      "crop_size": {"height": 36, "width": 36}, "do_flip_channel_order": True, "do_normalize": False},
]  # fmt: skip


def huggingface(config: Mapping[str, Any], image: Any) -> Array:
    """What the image processors of transformers 4 and 5 do, written out."""
    kind, size = config.get("image_processor_type", ""), config["size"]
    filter = Image.Resampling(config.get("resample", 2))
    if isinstance(size, int):
        size = {"height": size, "width": size}
    crop = config.get("crop_size") if config.get("do_center_crop") else None
    if "height" in size:
        image = image.resize((size["width"], size["height"]), filter)
    else:
        edge = size["shortest_edge"]
        if kind.startswith("ConvNext"):
            crop, edge = {"height": edge, "width": edge}, int(edge / config["crop_pct"])
        edge = int(256 / 224 * edge) if kind.startswith("Levit") else edge
        short = min(image.size)
        image = image.resize((int(image.width * edge / short), int(image.height * edge / short)), filter)
    x = pixels(image) / 255
    if crop is not None:
        missing = max(0, crop["height"] - x.shape[0])
        x = np.pad(x, ((missing // 2, missing - missing // 2), (0, 0), (0, 0)))
        top, left = (x.shape[0] - crop["height"]) // 2, (x.shape[1] - crop["width"]) // 2
        x = x[top : top + crop["height"], left : left + crop["width"]]
    x = x - 1 if config.get("rescale_offset") else x
    x = (x - 0.5) / 0.25 if config.get("do_normalize", True) else x
    x = x / 0.25 if config.get("include_top") else x
    return x[..., ::-1] if config.get("do_flip_channel_order") else x


@pytest.mark.parametrize("config", CONFIGS, ids=[next(iter(each.values())) for each in CONFIGS])
def test_preprocessor_config(config: dict[str, Any], tmp_path: Path) -> None:
    image = picture(45, 70)
    (tmp_path / "m").mkdir()
    image.save(tmp_path / "a.png")
    whole = {"do_rescale": True, "rescale_factor": 1 / 255, "image_mean": [0.5] * 3, "image_std": [0.25] * 3, **config}
    (tmp_path / "m" / "preprocessor_config.json").write_text(json.dumps(whole))
    found = only(read(DataPath(tmp_path / "a.png", tmp_path / "m"), nchw("H", "W")))
    np.testing.assert_allclose(found[0].transpose(1, 2, 0), huggingface(config, image), atol=1e-5)


@pytest.mark.parametrize("name", ["ViT", "CLIP", "ConvNext", "Levit", "Bit", "MobileViT", "PoolFormer", "EfficientNet"])
def test_against_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="a peer, not a dependency")
    processor = getattr(transformers, f"{name}ImageProcessorPil", None)
    if processor is None:
        pytest.skip("transformers before 5")
    image = picture(301, 463)
    image.save(tmp_path / "a.png")
    (tmp_path / "preprocessor_config.json").write_text(processor().to_json_string())
    wanted = processor()(image, return_tensors="np")["pixel_values"][0]
    found = only(read(DataPath(tmp_path / "a.png", tmp_path / "preprocessor_config.json"), nchw("H", "W")))
    np.testing.assert_allclose(found[0], wanted, atol=1e-5)


def test_a_config_with_steps_that_have_no_counterpart(tmp_path: Path) -> None:
    picture().save(tmp_path / "a.png")
    for config, says in (
        ({"do_pad": True, "size": 32}, "do_pad has no counterpart here"),
        ({"size": {"longest_edge": 32}}, "size with longest_edge has no counterpart"),
        ({"size": None}, "size must be an integer or a mapping"),
        ({"size": {"shortest_edge": None}}, "shortest_edge must be an integer"),
    ):
        (tmp_path / "c.json").write_text(json.dumps({"do_rescale": True, "do_normalize": False, **config}))
        with pytest.raises(DataError, match=says):
            read(DataPath(tmp_path / "a.png", tmp_path / "c.json"), nchw())


def png(width: int, height: int, depth: int, color: int, rows: bytes) -> bytes:
    """A PNG file, by its specification."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("color", [0, 2, 4, 6])
def test_16_bits_of_png_are_refused(color: int, tmp_path: Path) -> None:
    """Grey, colours, and both with transparency; with 8 bits they are read."""
    channels = {0: 1, 2: 3, 4: 2, 6: 4}[color]
    for depth in (8, 16):
        rows = (b"\0" + bytes(range(1, 1 + 4 * channels * depth // 8))) * 4
        (tmp_path / "a.png").write_bytes(png(4, 4, depth, color, rows))
        path = DataPath(tmp_path / "a.png", "unit")
        if depth == 8:
            assert only(read(path, nchw(4, 4))).shape == (1, 3, 4, 4)
        else:
            with pytest.raises(DataError, match="has more than 8 bits a channel"):
                read(path, nchw(4, 4))


@pytest.mark.parametrize(("kind", "channels"), [("P6", 3), ("P5", 1)])
def test_16_bits_of_ppm_are_refused(kind: str, channels: int, tmp_path: Path) -> None:
    for most, size in ((255, 1), (100, 1), (1023, 2), (65535, 2)):
        values = bytes(4 * 4 * channels * size)
        (tmp_path / "a.ppm").write_bytes(f"{kind} 4 4 {most}\n".encode() + values)
        path = DataPath(tmp_path / "a.ppm", "unit")
        if size == 1:
            assert only(read(path, nchw(4, 4))).shape == (1, 3, 4, 4)
        else:
            with pytest.raises(DataError, match="has more than 8 bits a channel"):
                read(path, nchw(4, 4))


def test_no_other_program_reads_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PostScript with the suffix of an image is not given to Ghostscript."""
    monkeypatch.setattr("PIL.EpsImagePlugin.has_ghostscript", lambda: True)
    monkeypatch.setattr("subprocess.check_call", lambda *_, **__: pytest.fail("a program was started"))
    content = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    for name in ("a.png", "b.jpg", "c.tif"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match="it is no image that Pillow reads"):
            list(read(DataPath(tmp_path / name, "unit"), nchw(8, 8)))


def test_files_with_the_suffix_of_another_format_are_read(tmp_path: Path) -> None:
    """ImageNet has a PNG that is named .JPEG."""
    picture(32, 32).save(tmp_path / "a.png")
    (tmp_path / "a.png").rename(tmp_path / "b.jpeg")
    assert only(read(DataPath(tmp_path / "b.jpeg", "unit"), nchw())).shape == (1, 3, 32, 32)


@pytest.mark.parametrize("preset", ["imagenet", "unit"])
def test_small_files_of_many_pixels(preset: str, tmp_path: Path) -> None:
    """138 bytes that are resized to 5 million pixels a row; 20 kB with 169 million pixels."""
    Image.new("L", (65_000, 1)).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(png(13_000, 13_000, 1, 0, b""))
    names = {"imagenet": ["a.png", "b.png"], "unit": ["b.png"]}[preset]
    for name in names:
        tracemalloc.start()
        with pytest.raises(DataError, match=r"pixels, and at most 89478485 are decoded: make it smaller") as caught:
            list(read(DataPath(tmp_path / name, preset), nchw(224, 224)))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert f"'{tmp_path / name}'" in str(caught.value)
        assert peak < 8 << 20


@pytest.mark.parametrize(
    "values",
    [
        {"crop_size": {}, "do_center_crop": True, "size": {"height": 8, "width": 8}},
        {"size": {"height": "a", "width": 8}},
        {"size": {"shortest_edge": 8}, "image_processor_type": "PoolFormerImageProcessor", "crop_pct": "x"},
        {"size": 8, "resample": [1]},
        {"size": {"shortest_edge": 10**30}},
    ],
)
def test_wrong_values_of_hugging_face(values: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    picture(32, 32).save(tmp_path / "a" / "a.png")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"do_normalize": False, **values}))
    with pytest.raises(DataError):
        list(read(DataPath(tmp_path / "a", tmp_path / "preprocessor_config.json"), nchw(8, 8)))
