"""What low-rank adapters give back of what 4-bit weights lose: MiniLM of the pack, W4A8, trained on calibration texts.

python -m benchmarks.qat.adapters [--epochs N] [--rank N] [--backend NAME] [--limit N] [--write]
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.accuracy import load_pack
from benchmarks.results import arguments, table, write_section
from sbonnx import qat, quantize

MODEL: Final = "minilm_l6"
BITS: Final = "w4a8"
METRIC: Final = "spearman"
STARTS: Final[Mapping[str, Mapping[str, Any]]] = {"nearest": {"rounding": "nearest"}, "gptq": {"rounding": "gptq"}}
"""Recipe keys of each weight rounding that adapters start from."""

RECOVERED: Final = 0.5
"""Goal: fraction of the loss of nearest rounding that adapters must recover."""

HEADER: Final = ("what", "Spearman", "cosine with float", "given back", "trained numbers", "CPU s")


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        what: name of the row.
        spearman, cosine: metrics of the pack's evaluation; cosine is None for the float network.
        seconds: CPU seconds, including calibration.
        trained: number of trained values.
    """

    what: str
    spearman: float
    cosine: float | None = None
    seconds: float | None = None
    trained: int = 0


@dataclass
class Sentences:
    """Distillation loss for sentence embedding networks: error of the token states and of the embedding.

        sum_masked |h - h_float|^2 / sum_masked |h_float - mean|^2  +  mean (1 - cos(e, e_float))

    Padding is masked out; the mask is taken from each batch in `augment`. The token states contain more information
    on a text than its single embedding, which matters with few texts.

    Attributes:
        mask: (N, T), attention mask of the current batch.
    """

    mask: Tensor = field(default_factory=lambda: torch.ones(0))

    def augment(self, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """Return the batch unchanged, and store its mask."""
        self.mask = batch["attention_mask"].bool()
        return batch

    def loss(self, outputs: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> Tensor:
        """Compute the loss, a scalar; 0 for equal outputs."""
        tokens, wanted = (some["last_hidden_state"][self.mask] for some in (outputs, targets))
        spread = (wanted - wanted.mean()).square().sum()
        near = functional.cosine_similarity(outputs["sentence_embedding"], targets["sentence_embedding"])
        return (tokens - wanted).square().sum() / spread + (1.0 - near).mean()


def trained(model: Path, feeds: list[dict[str, Any]], start: str, args: Any, path: Path) -> int:
    """Calibrate, train adapters and export; returns the number of trained values."""
    adapters = qat.Adapters(rank=args.rank)
    module = qat.prepare(model, feeds, backend=args.backend, bits=BITS, adapters=adapters, **STARTS[start])
    count: int = sum(one.numel() for one in module.parameters() if one.requires_grad)
    sentences = Sentences()
    settings = qat.Settings(epochs=args.epochs, batch=args.batch, lr=args.lr, quant_lr=args.quant_lr)
    qat.train(module, feeds, settings, loss=sentences.loss, augment=sentences.augment)
    qat.export(module, path, verify=False, force=True)
    return count


def calibrated(model: Path, feeds: list[dict[str, Any]], start: str, args: Any, path: Path) -> int:
    """Calibrate and export without training; returns 0."""
    quantize(model, feeds, output=path, backend=args.backend, bits=BITS, verify=False, force=True, **STARTS[start])
    return 0


def measured(pack: Any, path: Path, what: str, limit: int | None, make: Callable[[], int]) -> Row:
    """Return the row of a file that `make` writes."""
    begin = time.process_time()
    count = make()
    seconds = time.process_time() - begin
    found = pack.evaluate(MODEL, str(path), limit=limit)
    row = Row(what, found[METRIC], found["mean_cosine_with_float"], seconds, count)
    print(f"{what}: {row.spearman:.4f}, cosine {row.cosine:.4f}, {seconds:.0f} CPU s", file=sys.stderr)
    return row


def measure(pack: Any, args: Any) -> list[Row]:
    """Measure all rows; float is the first, nearest the second."""
    model, feeds = Path(pack.model_path(MODEL)), list(pack.load_calib(MODEL))
    found = [Row("float", pack.evaluate(MODEL, limit=args.limit)[METRIC])]
    with tempfile.TemporaryDirectory(prefix="adapters-") as folder:
        path = Path(folder) / "quantized.onnx"
        for start, name in (("nearest", "PTQ nearest"), ("gptq", "PTQ gptq (default)")):
            make = partial(calibrated, model, feeds, start, args, path)
            found.append(measured(pack, path, name, args.limit, make))
        for start in STARTS:
            make = partial(trained, model, feeds, start, args, path)
            found.append(measured(pack, path, f"adapters, from {start}", args.limit, make))
    return found


def given_back(row: Row, rows: list[Row]) -> float | None:
    """Return the fraction of the loss of nearest that a row recovers; None for float and nearest, or without a loss."""
    best, least = rows[0].spearman, rows[1].spearman
    return None if row in rows[:2] or best <= least else (row.spearman - least) / (best - least)


def cells(row: Row, rows: list[Row]) -> list[str]:
    """Format a row of the table."""
    share = given_back(row, rows)
    return [
        row.what,
        f"{row.spearman:.4f}",
        "" if row.cosine is None else f"{row.cosine:.4f}",
        "" if share is None else f"{share:.0%}",
        f"{row.trained:,}" if row.trained else "",
        "" if row.seconds is None else f"{row.seconds:.0f}",
    ]


def text(rows: list[Row], args: Any) -> str:
    """Return the section."""
    return (
        "## Low-rank adapters\n\n"
        f"{MODEL} of the pack, {BITS.upper()}, a scale a channel, backend {args.backend}. Adapters of rank {args.rank} "
        f"inside the rounding, with scales, biases and norms; {args.epochs} epochs over the calibration texts, "
        f"{args.batch} a step, lr {args.lr:g}, no labels: tokens and embedding as in the float network. Given back: "
        f"of the Spearman that nearest loses.\n\n" + table(HEADER, [cells(row, rows) for row in rows])
    )


def main() -> int:
    """Measure and print the table. Exit code 1 if adapters from nearest recover less than `RECOVERED`."""
    parser = arguments(__doc__)
    parser.add_argument("--backend", default="virtual")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-2)
    parser.add_argument("--quant-lr", type=float, default=3e-3)
    parser.add_argument("--limit", type=int, help="pairs of texts to evaluate on; default: all")
    args = parser.parse_args()
    rows = measure(load_pack(args.pack), args)
    made = text(rows, args)
    print(made)
    if args.write:
        write_section("qat adapters", made)
    share = given_back(rows[3], rows)
    return 0 if share is None or share >= RECOVERED else 1


if __name__ == "__main__":
    raise SystemExit(main())
