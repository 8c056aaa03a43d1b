"""Way of the calibration data through the code: functions that take it, files, and returns to a file left before.

python -m benchmarks.trip [--list]

One run of `sbonnx.quantize` on the bundled model is traced. A call counts if one of its arguments is the caller's data,
the `Dataset` read from it, or the `Samples` made from that; calls of the same function count once.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import sbonnx
from benchmarks.results import ROOT, table
from sbonnx.assets import digits
from sbonnx.calib.data.dataset import Dataset
from sbonnx.calib.engine.samples import Samples


def visits(data: Any) -> list[tuple[str, str]]:
    """Return (file, function) of every call that takes the data, in order, while a model is quantized with it."""
    calls: list[tuple[str, str]] = []

    def trace(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(ROOT)) or code.co_name.startswith("<"):
            return
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        values = [frame.f_locals.get(name) for name in arguments]
        if any(value is data or isinstance(value, Dataset | Samples) for value in values):
            name = getattr(code, "co_qualname", code.co_name)  # since Python 3.11 with the class
            place = str(Path(code.co_filename).resolve().relative_to(ROOT)), name
            if place not in calls:
                calls.append(place)

    with tempfile.TemporaryDirectory() as folder:
        sys.setprofile(trace)
        try:
            sbonnx.quantize(digits().model, data, output=Path(folder) / "q.onnx", backend="onnxruntime")
        finally:
            sys.setprofile(None)
    return calls


def main() -> int:
    """Print the three figures, or the functions."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="list the functions in the order of their first call")
    options = parser.parse_args()
    calls = visits(str(digits().calib))
    if options.list:
        print("\n".join(f"{file}: {name}" for file, name in calls))
        return 0
    files = [file for file, _ in calls]
    changes = [file for before, file in zip([None, *files], files, strict=False) if file != before]
    returns = len(changes) - len(set(changes))
    rows = [
        ("functions", len(calls), "≤ 55"),
        ("files", len(set(files)), "≤ 30"),
        ("returns to a file", returns, "≤ 20"),
    ]
    print(table(("figure", "value", "goal"), [(name, str(value), goal) for name, value, goal in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
