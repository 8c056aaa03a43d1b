"""Accuracy and cost of structured pruning, without training, with other ways and peers: section of docs/results/.

python -m benchmarks.pruning --pack FOLDER [MODEL ...] [--shares 0.75 0.5] [--ways WAY ...] [--kept FILE] [--write]

All ways get the same file and calibration samples, and leave at most the same share of the multiplications, counted on
the written file. Peers run in their own environments (`make peers`); one that is not there leaves its reason.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

from benchmarks.accuracy import load_pack
from benchmarks.kept import Kept, Record
from benchmarks.peers.environments import FOLDER, PEERS
from benchmarks.pruning.files import Feed, float_pass, latency_ratio, sizes
from benchmarks.pruning.scores import Logits, cell, judge, logits
from benchmarks.pruning.ways import ONNXSIM, STANDARD, TORCH_PRUNING, TRIED, WAYS, NotRun, Subject, tuned
from benchmarks.results import arguments, not_measured, table, write_section

MODELS: Final = ("cifar_resnet20", "squeezenet11", "mobilenetv2_tin200")

MULTIPLES: Final = {"squeezenet11": 16}
"""Multiple of the remaining channels, by model; 1 for others."""

FLOAT: Final = "float"

HEADER: Final = (
    *("model", "way", "multiplications", "stored values", "latency", "top-1", "as float", "KL, nats"),
    *("CPU s", "float passes"),
)


def main() -> None:
    """Print one row for each model, share and way."""
    parser = arguments(__doc__)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--shares", nargs="*", type=float, default=(0.75, 0.5))
    parser.add_argument("--ways", nargs="*", choices=tuple(WAYS), default=STANDARD)
    parser.add_argument("--samples", type=int, help="calibration samples; default: all of the pack")
    parser.add_argument("--peers", type=Path, default=FOLDER, help="folder of the peers' environments")
    parser.add_argument("--kept", type=Path, help="file of records of an interrupted run")
    parser.add_argument("--again", nargs="*", default=(), help="ways to measure again")
    parser.add_argument("--only-kept", action="store_true", help="table of the records, without measuring")
    given = parser.parse_args()
    pack, kept = load_pack(given.pack), Kept(given.kept, given.again)
    rows: list[tuple[str, ...]] = []
    missing: list[tuple[str, ...]] = []
    for name in given.models:
        with tempfile.TemporaryDirectory(prefix="pruning-") as folder:
            bench = Bench(pack, name, Path(folder), given.peers, given.samples)
            keys = [(name, "1", FLOAT), *((name, f"{share:g}", way) for share in given.shares for way in given.ways)]
            for key in keys:
                if given.only_kept and kept.get(*key) is None:
                    missing.append(key)
                    continue
                rows.append(row(key, kept.record(key, partial(bench.record, key))))
                print(" | ".join(rows[-1]), flush=True)
    if given.write:
        write_section("pruning", text_of(rows, given.ways, missing))


class Bench:
    """Measurements of one model.

    Args:
        samples: number of calibration samples; None: all.
    """

    def __init__(self, pack: Any, name: str, folder: Path, peers: Path, samples: int | None) -> None:
        self._pack, self._name, self._folder, self._peers, self._samples = pack, name, folder, peers, samples
        self._model = Path(pack.model_path(name))

    @cached_property
    def _feeds(self) -> list[Feed]:
        feeds: list[Feed] = self._pack.load_calib(self._name, limit=self._samples)
        return feeds

    @cached_property
    def _reference(self) -> Logits:
        return logits(self._pack, self._name, self._model)

    def record(self, key: tuple[str, ...]) -> Record:
        """Prune with a share and a way, and evaluate and time the file; `FLOAT`: the float model."""
        _, share, way = key
        if way == FLOAT:
            return {"shares": ["1", "1"], "latency": "1", "cpu": 0.0, **self._judge(self._model)}
        subject = Subject(
            self._model, self._feeds, self._folder, MULTIPLES.get(self._name, 1), float(share), self._peers
        )
        try:
            path, seconds = WAYS[way](subject)
        except NotRun as reason:
            return {"why": f"not run: {reason}"}
        before, after = (sizes(each, self._feeds[0]) for each in (self._model, path))
        shares = [f"{new / old:.3f}" for old, new in zip(before, after, strict=True)]
        latency = "-"
        if WAYS[way] is tuned:
            shares = [f"{subject.left(self._folder / TRIED):.3f}", "-"]
        else:
            latency = f"{latency_ratio(self._model, path, self._feeds[0]):.2f}"
        passes = seconds / float_pass(self._model, self._feeds)
        return {"shares": shares, "latency": latency, "cpu": seconds, "passes": passes, **self._judge(path)}

    def _judge(self, path: Path) -> Record:
        return judge(self._pack, self._name, self._reference, logits(self._pack, self._name, path))


def row(key: Sequence[str], record: Record) -> tuple[str, ...]:
    """Return the cells of a record."""
    name, share, way = key
    if way == FLOAT:
        return (name, FLOAT, *record["shares"], record["latency"], cell(record, "top1"), "", "", "", "")
    label = f"{way}, at most {share}"
    if "why" in record:
        return (name, label, "", "", "", record["why"], "", "", "", "")
    return (
        *(name, label, *record["shares"], record["latency"]),
        *(cell(record, "top1"), cell(record, "agreement"), cell(record, "kl")),
        *(f"{record['cpu']:.1f}", f"{record['passes']:.0f}"),
    )


def text_of(rows: Sequence[Sequence[str]], ways: Sequence[str], missing: Sequence[Sequence[str]]) -> str:
    """Return the section: what was run, and the table. `missing`: keys without a record."""
    used = [peer for peer in (ONNXSIM, TORCH_PRUNING) if any(way.startswith(peer) for way in ways)]
    versions = "; ".join(PEERS[peer].versions for peer in used) or "none"
    multiples = ", ".join(f"{name} {multiple}" for name, multiple in MULTIPLES.items())
    return (
        "## Structured pruning\n\n`python -m benchmarks.pruning --write`. No training, no labels; obs is the default "
        "of `sbonnx prune`. All ways get the same float file and calibration samples, of which ours holds out a "
        "tenth for verification; multiplications and stored values are counted on the written files. Uniform: one "
        "ratio for all dimensions, the least that meets the share. Mean and variance: of each output of each layer as "
        "in the float network (batch-norm tuning). torch-pruning: ratio of all groups (local) or of all channels "
        "(global), batch norms tuned on the samples; its gradients are those of the classes that the float network "
        "predicts. Latency: relative to float, runs alternating, one thread. top-1, share of the samples with the "
        "class of float, and mean divergence from the float network, with 95 % intervals over the samples; ResNet-20: "
        "clean / JPEG images. CPU s: of pruning, verification included (torch-pruning: search of the ratio and export "
        "included); float passes: the same in passes of the float network over all calibration samples. Remaining "
        f"channels are multiples where ours can choose: {multiples}. Peers: {versions}."
        + f"{not_measured(missing)}\n\n"
        + table(HEADER, rows)
    )


if __name__ == "__main__":
    main()
