"""4-bit weights of matrix products, executed in OpenVINO, beside NNCF's `compress_weights`.

    python -m benchmarks.runtimes.openvino_weights [--peers FOLDER] [--write]

`make peers` builds NNCF's environment first. Both tools round the same products to 4 bits with zero points, in blocks
of 32, without data; tables of embeddings stay float in NNCF's files.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.accuracy import load_pack
from benchmarks.peers import environments
from benchmarks.results import arguments, table, write_section
from benchmarks.scores import divergences
from benchmarks.w8a8.runs import process
from sbonnx.backends.openvino.runtime import OpenVinoSession, version
from sbonnx.metrics import ratio_db
from sbonnx.spec import Array
from sbonnx.verify import session

SAMPLES: Final = 8
TOKENS: Final = 64
OURS: Final = ("--backend", "openvino", "--mode", "weight_only")

Subject = tuple[str, Path, list[dict[str, Array]]]


def subjects(pack: Any, folder: Path) -> Iterator[Subject]:
    """Yield name, file and feeds of each model."""
    yield "minilm_l6", Path(pack.model_path("minilm_l6")), pack.load_calib("minilm_l6", limit=SAMPLES, batch=1)
    llama = folder / "classics_llama"
    model = llama / "optimum" / "model.onnx"
    tokens = np.load(llama / "eval.npz")["ids"][:SAMPLES, :TOKENS].astype(np.int64)
    yield "classics_llama", model, [prompt(model, row) for row in tokens]


def prompt(model: Path, tokens: Array) -> dict[str, Array]:
    """Return the feed of a prompt with an empty cache."""
    feed: dict[str, Array] = {}
    for entry in session(model).get_inputs():
        if entry.name.startswith("past"):
            feed[entry.name] = np.zeros((1, entry.shape[1], 0, entry.shape[3]), np.float32)
        elif entry.name == "input_ids":
            feed[entry.name] = tokens[None]
        elif entry.name == "position_ids":
            feed[entry.name] = np.arange(len(tokens), dtype=np.int64)[None]
        else:
            feed[entry.name] = np.ones((1, len(tokens)), np.int64)
    return feed


def cells(subject: Subject, peers: Path, folder: Path) -> Iterator[list[str]]:
    """Quantize one model with both tools, and yield their rows."""
    name, model, feeds = subject
    ours, theirs = folder / f"{name}.ours.onnx", folder / f"{name}.nncf.onnx"
    process([sys.executable, "-m", "sbonnx", "quantize", str(model), "-o", str(ours), *OURS], ours)
    unread = folder / "unread.npz"
    np.savez(unread, x=np.zeros((1, 1), np.float32))  # the peer's script reads samples, and this method uses none
    job = {"model": str(model), "data": str(unread), "output": str(theirs), "method": "compress"}
    script = environments.PEERS["nncf"].script
    process([str(environments.python_of(peers, "nncf")), "-m", script, json.dumps(job)], theirs)
    opened = session(model)
    first = opened.get_outputs()[0].name
    wanted = [opened.run([first], feed)[0] for feed in feeds]
    for tool, path in (("sbonnx", ours), ("NNCF", theirs)):
        runtime = OpenVinoSession(path, 1)
        found = [runtime.run([first], feed)[0] for feed in feeds]
        noise = sum(float(np.square(a - b).sum()) for a, b in zip(wanted, found, strict=True))
        error = ratio_db(sum(float(np.square(a).sum()) for a in wanted), noise)
        kl = "–"
        if first == "logits":
            pairs = zip(wanted, found, strict=True)
            kl = f"{np.mean([divergences(a[0], b[0]).mean() for a, b in pairs]):.4f}"
        yield [name, tool, f"{path.stat().st_size / 1e6:.2f}", f"{error:.1f}", kl]


def main() -> int:
    """Measure, print and write the table."""
    parser = arguments(__doc__)
    parser.add_argument("--peers", type=Path, default=environments.FOLDER, help="folder of the peers' environments")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        every = subjects(load_pack(options.pack), options.pack)
        rows = [row for subject in every for row in cells(subject, options.peers, Path(folder))]
    text = (
        "## 4-bit weights in OpenVINO\n\n"
        f"`python -m benchmarks.runtimes.openvino_weights --write`; OpenVINO {version()}, "
        f"{environments.PEERS['nncf'].versions}. `sbonnx quantize --backend openvino --mode weight_only` and "
        "`nncf.compress_weights` (INT4_ASYM, all products): 4 bits with zero points in blocks of 32, no data. The "
        f"first output against float on {SAMPLES} samples.\n\n"
        f"{table(('model', 'tool', 'MB', 'SQNR dB', 'KL divergence'), rows)}"
    )
    print(text)
    if options.write:
        write_section("openvino weights", text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
