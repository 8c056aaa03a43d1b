"""Quantized files in several runtimes: outputs beside those of onnxruntime at level off, and operators that differ.

    python -m benchmarks.runtimes.portability [--models NAME ...] [--runtimes LIST] [--kept FILE] [--write]

Rows of the page that are not measured stay as they are. Files of networks are calibrated on at most 32 samples of the
model pack (`effort="fast"`) and run on four others. Those of decoders have 4-bit weights, and run on 16 tokens after a
cache of 16. `--kept` continues an interrupted run.
"""

from __future__ import annotations

import logging
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

import numpy as np

import sbonnx
from benchmarks.accuracy import load_pack
from benchmarks.kept import Kept, Record
from benchmarks.results import RESULTS, arguments, table, write_section
from sbonnx.backends import Runtime
from sbonnx.errors import SbonnxError
from sbonnx.present.text.tables import decibels
from sbonnx.report.comparison import RuntimeRow
from sbonnx.runtimes import GROUPS, chosen_runtimes
from sbonnx.runtimes.portability import FEEDS, portability
from sbonnx.spec import Array
from sbonnx.verify import session

NETWORKS: Final = (
    "cifar_resnet20",
    "mobilenetv2_tin200",
    "mobilenetv1_tin200",
    "squeezenet11",
    "minilm_l6",
    "fastestdet",
    "ultraface_rfb320",
    "silero_vad",
)
RUNTIMES: Final = "onnxruntime,openvino,wasm,webgpu,arm64,opencv,qnn,tensorrt-rtx,onnxruntime-cuda"
PREFIX: Final = "onnxruntime-"
NAMES: Final = tuple(name for part in RUNTIMES.split(",") for name in GROUPS.get(part, (part,)))
"""Names of the runtimes, in the order of the columns."""
SAMPLES: Final = 32
TOKENS: Final = 16
DECODERS: Final = {
    "classics_llama": "classics_llama/optimum",
    "gpt2": "llm_structures/optimum_gpt2",
    "llama": "llm_structures/optimum_llama",
}
"""Folders of decoders below that of the pack, by name."""

Options = Mapping[str, Any]

NETWORK_FILES: Final[Mapping[str, Options]] = {
    name: {"backend": name, "effort": "fast"} for name in ("onnxruntime", "web", "openvino", "qnn", "tensorrt")
}
DECODER_FILES: Final[Mapping[str, Options]] = {
    name: {"backend": name, "mode": "weight_only"} for name in ("onnxruntime", "web", "openvino", "tensorrt")
}
"""Options of `sbonnx.quantize` by name of the file."""

REASONS: Final = (
    (
        "differs",
        "squeezenet11 for tensorrt in openvino",
        "",
        "products saturate on AVX2 without VNNI, measured there; 30.4 dB with VNNI; a convolution alone is equal with "
        "weights of 7 bits",
    ),
    ("differs", "for tensorrt in qnn", "", "what is float between the pairs has half precision on the HTP (presumed)"),
    (
        "differs",
        "onnxruntime-saturating",
        "",
        "products of AVX2 without VNNI saturate: these files are for exact products",
    ),
    (
        "differs",
        "minilm_l6 for qnn in",
        "",
        "rounding grows through the layers of 8 bits (presumed): as far from the reference as from float",
    ),
    (
        "differs",
        " in qnn",
        "Conv_3'",
        "the HTP computes depthwise channels wrongly whose s_x s_w / s_y is 2^-24 or less",
    ),
    ("refused", "fastestdet", "Conv_761_DequantizeLinear", "TensorRT has no int32 biases"),
    (
        "differs",
        "in arm64",
        "Conv_221",
        "onnxruntime's ARM64 kernel of depthwise 3x3 adds two products in int16: weights of -128 at inputs of 0 "
        "overflow; equal with -127",
    ),
    ("differs", "", "float operators in float32", "float operators of the runtime have fewer bits; equal in float32"),
    (
        "differs",
        "",
        "halved weights",
        "the runtime computes large sums of 8-bit products otherwise; equal with halved weights",
    ),
    (
        "differs",
        "",
        "one scale for all",
        "the runtime cannot hold the smallest scales; equal with one for all channels",
    ),
    ("differs", "silero_vad", "If_0", "WebGPU computes the float model otherwise too: 1.3 to 43.5 dB on these samples"),
    ("refused", "tensorrt-rtx", "Failed to import initializer", "TensorRT has no 16-bit integers"),
    ("refused", "opencv", "CV_8U", "OpenCV has no 16-bit integers"),
    ("refused", "tensorrt-rtx", "Non-zero zero point", "TensorRT has no zero points"),
    ("refused", "tensorrt-rtx", "Plugin not found", "an operator of onnxruntime alone"),
    ("refused", "tensorrt-rtx", "type of UINT8", "TensorRT has no uint8 weights"),
    (
        "refused",
        "openvino",
        "GatherBlockQuantized|type dynamic",
        "of GatherBlockQuantized, OpenVINO takes no table that is tied to the head",
    ),
    ("refused", "openvino", "rank has to be known", "OpenVINO refuses the float model too"),
    ("refused", "opencv", "'Graph' is not supported", "OpenCV has no control flow"),
    (
        "refused",
        "silero_vad",
        "Squeeze",
        "with fixed shapes, the branch for the other sampling rate is not valid",
    ),
    ("refused", "tensorrt-rtx", "bias_DequantizeLinear", "TensorRT has no int32 biases"),
    ("refused", "opencv", "GatherBlockQuantized", "an operator of onnxruntime alone"),
    ("refused", "opencv", "data type", "OpenCV has no 4-bit integers"),
    ("refused", "opencv", "bufidx", "an assertion of OpenCV 5.0 itself, of files with uint8 codes and Pad"),
    ("refused", "qnn", "NHWC", "the provider takes a convolution behind padded codes, and gives it back"),
    (
        "refused",
        "qnn",
        "finalize",
        "float operators or types between the pairs that the HTP does not have (docs/qnn.md)",
    ),
)
"""State, text in "MODEL for FILE in RUNTIME", pattern in the message, and the cause; the first row that fits."""


@dataclass(frozen=True)
class Subject:
    """A model of the table.

    Attributes:
        name, model: its name and its float file.
        calibration: feeds to calibrate on; empty for files without calibration.
        feeds: on which its files run.
        files: options of the files by name.
    """

    name: str
    model: Path
    calibration: list[dict[str, Array]]
    feeds: list[dict[str, Array]]
    files: Mapping[str, Options]


def subject_of(pack: Any, folder: Path, name: str) -> Subject:
    """Return the model of a name, of the pack or of `DECODERS`."""
    if name not in DECODERS:
        feeds = list(pack.load_calib(name, batch=1, limit=SAMPLES + FEEDS))
        return Subject(name, Path(pack.model_path(name)), feeds[:-FEEDS], feeds[-FEEDS:], NETWORK_FILES)
    model = folder / DECODERS[name] / "model.onnx"
    return Subject(name, model, [], list(decoder_feeds(model)), DECODER_FILES)


def decoder_feeds(model: Path) -> Iterator[dict[str, Array]]:
    """Yield feeds of `TOKENS` tokens after a cache of as many, which the float model has computed."""
    opened = session(model)
    entries = {entry.name: entry.shape for entry in opened.get_inputs()}
    caches = [name for name in entries if name.startswith("past")]
    outputs = [entry.name for entry in opened.get_outputs()]
    random = np.random.default_rng(0)

    def feed(past: Mapping[str, Array]) -> dict[str, Array]:
        seen = next(iter(past.values())).shape[2]
        values = {
            "input_ids": random.integers(3, 250, (1, TOKENS)),
            "attention_mask": np.ones((1, seen + TOKENS), np.int64),
            "position_ids": np.arange(seen, seen + TOKENS)[None],
        }
        return {name: past[name] if name in past else values[name] for name in entries}

    for _ in range(FEEDS):
        empty = {name: np.zeros((1, entries[name][1], 0, entries[name][3]), np.float32) for name in caches}
        present = dict(zip(outputs, opened.run(None, feed(empty)), strict=True))
        yield feed({name: present[name.replace("past_key_values", "present")] for name in caches})


class QuantizedFile:
    """File of a model for a backend, written when it is first run.

    Args:
        subject: the model.
        options: of `sbonnx.quantize`.
        path: of the file.
    """

    def __init__(self, subject: Subject, options: Options, path: Path) -> None:
        self._subject, self._options, self._path = subject, options, path

    @cached_property
    def _refusal(self) -> str:
        """Write the file; return why there is none, or ""."""
        try:
            data = self._subject.calibration or None
            sbonnx.quantize(self._subject.model, data, output=self._path, verify=False, **self._options)
        except SbonnxError as error:
            return str(error)
        return ""

    def record(self, runtime: Runtime) -> Record:
        """Return the record of the file in a runtime."""
        if self._refusal:
            return {"cell": "no file", "state": "", "why": self._refusal}
        subject = self._subject
        return record_of(portability(subject.model, self._path, subject.feeds, [runtime]).rows[0])


def measure(subject: Subject, runtimes: tuple[Runtime, ...], kept: Kept) -> Iterator[tuple[str, str, Record]]:
    """Yield name of the file, name of the runtime and record."""
    for title, options in subject.files.items():
        with tempfile.TemporaryDirectory() as folder:
            file = QuantizedFile(subject, options, Path(folder, "quantized.onnx"))
            for runtime in runtimes:
                value = kept.record((subject.name, title, runtime.name), partial(file.record, runtime))
                print(subject.name, title, runtime.name, value["cell"], value["why"], sep=" | ", flush=True)
                yield title, runtime.name, value


def record_of(row: RuntimeRow) -> Record:
    """Return the cell of a row of the table, its state, and what differs or why the file was refused."""
    cell: str = row.state
    if row.sqnr_db is not None and row.reference_db is not None:
        text = f"{row.sqnr_db:.1f} / {decibels(row.reference_db).removesuffix(' dB')}"
        cell = f"**{text}**" if row.state == "differs" else text
    if row.fallback and row.state != "refused":
        cell += f" ({len(row.fallback)})"
    return {"cell": cell, "state": row.state, "why": str(row.differs) if row.differs else row.why}


def cause_of(where: str, record: Record) -> str:
    """Return the cause of a difference or refusal.

    Args:
        where: "MODEL for FILE in RUNTIME".
    """
    fits = (
        cause
        for state, name, pattern, cause in REASONS
        if record["state"] == state and name in where and re.search(pattern, record["why"])
    )
    return next(fits, f"not explained: {record['why'] or 'no operator differs alone'}")


def main() -> int:
    """Measure and print a table, and write it with --write."""
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="*", default=(*NETWORKS, *DECODERS))
    parser.add_argument("--runtimes", default=RUNTIMES)
    parser.add_argument("--kept", type=Path, help="file with the measured records")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    pack, runtimes, kept = load_pack(options.pack), chosen_runtimes(options.runtimes), Kept(options.kept)
    rows, causes = rows_of((RESULTS / "backends.md").read_text(encoding="utf-8"))
    for name in options.models:
        for title, runtime, record in measure(subject_of(pack, options.pack, name), runtimes, kept):
            rows.setdefault((name, title), {})[runtime] = record["cell"]
            file = f"{name} for {title}"
            for key, files in causes.items():
                if key[0] == runtime and file in files:
                    files.remove(file)
            if record["state"] in ("differs", "refused"):
                key = (runtime, record["state"], cause_of(f"{file} in {runtime}", record))
                causes.setdefault(key, []).append(file)
    order = {name: place for place, name in enumerate((*NETWORKS, *DECODERS))}
    rows = dict(sorted(rows.items(), key=lambda row: order[row[0][0]]))
    missing = sorted(order.keys() - {name for name, _ in rows})
    text = text_of(rows, list(NAMES), {key: files for key, files in causes.items() if files})
    text += f"\n\nNot measured: {', '.join(missing)}." if missing else ""
    print(text)
    if options.write:
        write_section("runtimes", text)
    return 0


Rows = dict[tuple[str, str], dict[str, str]]
Causes = dict[tuple[str, ...], list[str]]


def rows_of(page: str) -> tuple[Rows, Causes]:
    """Return cells by file and runtime, and files by runtime, state and cause, of the section of a page."""
    rows: Rows = {}
    causes: Causes = {}
    names = {name.removeprefix(PREFIX): name for name in NAMES}
    header: list[str] = []
    for line in page.partition("<!-- begin runtimes -->")[2].partition("<!-- end runtimes -->")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if cells[0] in ("model", "runtime"):
            header = cells
        elif cells[0] in (*NETWORKS, *DECODERS):
            row = rows.setdefault((cells[0], cells[1]), {})
            row.update((names[title], cell) for title, cell in zip(header[2:], cells[2:], strict=True))
        elif header[:1] == ["runtime"] and cells[0] in NAMES:
            causes[cells[0], cells[1], cells[3]] = cells[2].split(", ")
    return rows, causes


def text_of(
    rows: Mapping[tuple[str, str], Mapping[str, str]], names: list[str], causes: Mapping[tuple[str, ...], list[str]]
) -> str:
    """Return the section of the page."""
    cells = [(*key, *(row.get(name, "not measured") for name in names)) for key, row in rows.items()]
    titles = [name.removeprefix(PREFIX) for name in names]
    listed = [(*key[:2], ", ".join(files), key[2]) for key, files in sorted(causes.items())]
    return (
        "## Files of each backend in each runtime\n\n"
        "`python -m benchmarks.runtimes.portability --write`; networks are calibrated on at most 32 samples "
        "(`--effort fast`), decoders have 4-bit weights. SQNR in dB against float / against onnxruntime at level off, "
        "on four other samples; in brackets, the number of nodes that the runtime leaves to the CPU. In bold: the file "
        "has another answer there. cuda: onnxruntime's CUDA provider on an NVIDIA H200.\n\n"
        f"{table(('model', 'file for', *titles), cells)}\n\n"
        "### What differs, and why\n\n"
        f"{table(('runtime', 'result', 'files', 'cause'), listed)}"
    )


if __name__ == "__main__":
    sys.exit(main())
