"""Quantized files in several runtimes: outputs beside those of onnxruntime at level off, and operators that differ.

    python -m benchmarks.runtimes.portability [--models NAME ...] [--runtimes LIST] [--write]

Each file is calibrated on 32 samples of the model pack (`effort="fast"`) and run on four others. `--write` replaces the
table of docs/runtimes.md.
"""

from __future__ import annotations

import logging
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import sbonnx
from benchmarks.accuracy import load_pack
from benchmarks.results import ROOT, arguments, table
from sbonnx.errors import SbonnxError
from sbonnx.present.text.tables import decibels
from sbonnx.report.comparison import Portability, RuntimeRow
from sbonnx.runtimes import ALL, chosen_runtimes
from sbonnx.runtimes.portability import FEEDS, portability

MODELS: Final = ("cifar_resnet20", "squeezenet11", "minilm_l6")
SAMPLES: Final = 32
FILES: Final[dict[str, dict[str, Any]]] = {
    "onnxruntime": {"backend": "onnxruntime"},
    "onnxruntime, `REDUCE_RANGE: false`": {"backend": "onnxruntime", "reduce_range": False},
    "openvino": {"backend": "openvino"},
    "qnn": {"backend": "qnn"},
    "tensorrt": {"backend": "tensorrt"},
}
"""Options of `sbonnx.quantize` by name of the file."""

PAGE: Final = ROOT / "docs" / "runtimes.md"
TABLE: Final = re.compile(r"(?<=<!-- begin portability -->\n).*?(?=<!-- end portability -->)", re.DOTALL)


def measure(pack: Any, name: str, folder: Path, runtimes: str) -> list[tuple[str, ...]]:
    """Return the rows of one model."""
    model, feeds = Path(pack.model_path(name)), list(pack.load_calib(name, batch=1, limit=SAMPLES + FEEDS))
    rows = []
    for number, (title, options) in enumerate(FILES.items()):
        target = folder / f"{name}.{number}.onnx"
        try:
            sbonnx.quantize(model, feeds[:SAMPLES], output=target, verify=False, effort="fast", **options)
        except SbonnxError as error:
            print(name, title, error, flush=True)
            continue
        result = portability(model, target, feeds[SAMPLES:], chosen_runtimes(runtimes))
        rows.append((name, title, *cells(result)))
        print(*rows[-1], sep=" | ", flush=True)
        for row in result.rows:
            if row.state in ("differs", "refused", "absent"):
                print(f"  {row.runtime}: {row.state} {row.differs or row.why}", flush=True)
    return rows


def cells(result: Portability) -> tuple[str, ...]:
    """Return a cell for each runtime: SQNR against float and against the reference, and what differs."""
    return tuple(map(_cell, result.rows))


def _cell(row: RuntimeRow) -> str:
    if row.sqnr_db is None or row.reference_db is None:
        return row.state
    text = f"{row.sqnr_db:.1f} / {decibels(row.reference_db).removesuffix(' dB')}"
    return f"**{text}, {row.differs.op}**" if row.differs is not None else text


def main() -> int:
    """Measure and print a table, and write it to docs/runtimes.md with --write."""
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--runtimes", default=ALL)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    pack = load_pack(options.pack)
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for name in options.models for row in measure(pack, name, Path(folder), options.runtimes)]
    names = (runtime.name.removeprefix("onnxruntime-") for runtime in chosen_runtimes(options.runtimes))
    text = f"{table(('model', 'file for', *names), rows)}\n"
    print(text)
    if options.write:
        PAGE.write_text(TABLE.sub(lambda _: text, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
