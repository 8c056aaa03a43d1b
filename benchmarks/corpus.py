"""Every model that the onnx package carries for its backend tests: quantized and run, or refused with a reason.

python -m benchmarks.corpus [--folder simple ...] [--backend onnxruntime] [--write]
"""

from __future__ import annotations

import collections
import itertools
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.backend.test
from onnx import numpy_helper

import sbonnx
from benchmarks.results import arguments, table, write_section
from sbonnx import verify
from sbonnx.errors import SbonnxError

FOLDERS = ("light", "simple", "pytorch-converted", "pytorch-operator", "node")

SPEED_SAYS_NOTHING: dict[str, Any] = {"VERIFY.LATENCY": False}
"""No latency measurement: there are thousands of models, most with only a few values."""


@dataclass(frozen=True)
class Case:
    """One model and one feed."""

    name: str
    folder: str
    model: onnx.ModelProto
    feeds: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """Outcome of a case, "quantized", "left float", "refused" or "crashed", and the reason."""

    case: str
    folder: str
    kind: str
    why: str = ""


def cases(folders: tuple[str, ...] = FOLDERS) -> Iterator[Case]:
    """Yield all cases in order, folder by folder."""
    root = Path(onnx.backend.test.__file__).parent / "data"
    for folder in folders:
        if folder == "node":
            yield from _node_cases()
        elif folder == "light":
            for path in sorted((root / folder).glob("*.onnx")):
                model = onnx.load(str(path))
                yield Case(path.stem, folder, model, _made_up(model))
        else:
            for path in sorted((root / folder).glob("*/model.onnx")):
                model = onnx.load(str(path))
                yield Case(path.parent.name, folder, model, _stored(model, path.parent / "test_data_set_0"))


def _node_cases() -> Iterator[Case]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        found = collect_testcases(None)
    for case in found:
        if case.model is None or not case.data_sets:
            continue
        names = [value.name for value in case.model.graph.input]
        feeds = [_as_array(value) for value in case.data_sets[0][0]]
        yield Case(case.name, "node", case.model, dict(zip(names, feeds, strict=False)))


def _as_array(value: Any) -> Any:
    """Convert a value to an array; some cases contain protos or numpy scalars."""
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    return np.asarray(value) if isinstance(value, np.generic) else value


def _stored(model: onnx.ModelProto, folder: Path) -> dict[str, Any]:
    feeds: dict[str, Any] = {}
    held = {tensor.name for tensor in model.graph.initializer}
    for index, value in enumerate(value for value in model.graph.input if value.name not in held):
        data = (folder / f"input_{index}.pb").read_bytes()
        if value.type.WhichOneof("value") == "sequence_type":
            feeds[value.name] = numpy_helper.to_list(onnx.SequenceProto.FromString(data))
        elif value.type.WhichOneof("value") == "optional_type":
            feeds[value.name] = numpy_helper.to_optional(onnx.OptionalProto.FromString(data))
        else:
            feeds[value.name] = numpy_helper.to_array(onnx.TensorProto.FromString(data))
    return feeds


def _made_up(model: onnx.ModelProto) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    held = {tensor.name for tensor in model.graph.initializer}
    feeds = {}
    for value in model.graph.input:
        if value.name not in held:
            shape = [dim.dim_value or 1 for dim in value.type.tensor_type.shape.dim]
            feeds[value.name] = rng.random(shape, np.float32)
    return feeds


def run(case: Case, backend: str, folder: Path) -> Outcome:
    """Quantize one case and run the result at the lowest and the highest optimization level."""
    path, output = folder / "model.onnx", folder / "quantized.onnx"
    output.unlink(missing_ok=True)
    path.write_bytes(case.model.SerializeToString())

    def outcome(kind: str, why: str = "") -> Outcome:
        return Outcome(case.name, case.folder, kind, why)

    try:
        report = sbonnx.quantize(path, [case.feeds], recipe={"BACKEND": backend}, output=output, **SPEED_SAYS_NOTHING)
    except SbonnxError as error:
        lines = str(error).splitlines()
        if len(lines) != 1:
            return outcome("crashed", f"{len(lines)} lines of error: {error}")
        return outcome("refused", f"{type(error).__name__}: {lines[0]}")
    except Exception as error:  # any exception here is a finding of this benchmark
        return outcome("crashed", f"{type(error).__name__}: {error}")
    try:
        onnx.checker.check_model(str(output), full_check=True)
        for level in ("off", "all"):
            model = verify.session(output, level=level)
            names = {value.name for value in model.get_inputs()}
            model.run(None, {name: value for name, value in case.feeds.items() if name in names})
    except Exception as error:
        return outcome("crashed", f"the result does not run: {' '.join(str(error).split())}")
    if report.counts.weights + report.counts.activations:
        return outcome("quantized")
    return outcome("left float", "; ".join(sorted({refusal.why for refusal in report.refusals})))


def survey(folders: tuple[str, ...], backend: str, first: int = 0, every: int = 1) -> list[Outcome]:
    """Run every case, or every n-th one from the first, and return the outcomes."""
    with tempfile.TemporaryDirectory() as folder:
        return [run(case, backend, Path(folder)) for case in itertools.islice(cases(folders), first, None, every)]


def main() -> int:
    """Count and print the outcomes and, with --write, update docs/results/. Exit code 1 if a case crashed."""
    parser = arguments(__doc__)
    parser.add_argument("--folder", nargs="*", default=list(FOLDERS), choices=FOLDERS)
    parser.add_argument("--backend", nargs="*", default=["onnxruntime", "tensorrt", "virtual"])
    options = parser.parse_args()
    rows = []
    crashed: list[tuple[str, Outcome]] = []
    kinds = ("quantized", "left float", "refused", "crashed")
    for backend in options.backend:
        outcomes = survey(tuple(options.folder), backend)
        crashed += [(backend, outcome) for outcome in outcomes if outcome.kind == "crashed"]
        for folder in options.folder:
            count = collections.Counter(outcome.kind for outcome in outcomes if outcome.folder == folder)
            rows.append([backend, folder, *(str(count[kind]) for kind in kinds)])
        reasons = collections.Counter(
            outcome.why.split("'")[0].split(" /")[0] for outcome in outcomes if outcome.kind == "refused"
        )
        for why, number in reasons.most_common(40):
            print(f"{backend}: {number:4d} refused: {why[:150]}", file=sys.stderr)
    for backend, outcome in crashed:
        print(f"{backend}: {outcome.folder}/{outcome.case} crashed: {outcome.why[:300]}", file=sys.stderr)
    text = (
        "## Models of the onnx package\n\n`python -m benchmarks.corpus --write`: every model that the onnx package "
        "carries for its backend tests, quantized on its own test input and run in onnxruntime, or refused in one "
        "line. Left float: it came out as it went in, with the reasons in its report.\n\n"
        + table(["backend", "folder", *kinds], rows)
    )
    print(text)
    if options.write:
        write_section("corpus", text)
    return int(bool(crashed))


if __name__ == "__main__":
    raise SystemExit(main())
