"""Saves and loads plans, as plain values for JSON, and solutions, as one .npz file with the specs as JSON inside."""

from __future__ import annotations

import io
import json
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from sbonnx.errors import ModelError, RecipeError
from sbonnx.graph.storage.output_files import write_bytes
from sbonnx.plan.magnitudes import Magnitudes
from sbonnx.plan.types import Gain, GivenParams, ObserverChoice, Plan, Reader, RoundingChoice, Site, Solution
from sbonnx.report import Refusal
from sbonnx.spec import FP8, Array, Bounds, QParams, QuantSpec, ScaleLimits

PLAN_FORMAT: Final = 1
SOLUTION_FORMAT: Final = 1
HEAD: Final = "sbonnx.json"

DAMAGED: Final = (
    *(OSError, EOFError, KeyError, ValueError, NotImplementedError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error, struct.error),
)
"""Errors that zipfile, numpy and json raise for a damaged file. What they return has the right checksums."""


def save_solution(solution: Solution, path: Path) -> None:
    """Write a solution atomically, replacing an existing file.

    Raises:
        OutputError: the file cannot be written.
    """
    keys = list(dict.fromkeys([*solution.qparams, *solution.codes, *solution.bounds, *solution.bias_scales]))
    arrays: dict[str, Array] = {}
    for number, key in enumerate(keys):
        for part, values in _parts(solution, key).items():  # .npz does not support fp8: stored as bytes
            arrays[f"{number}.{part}"] = values.view(np.uint8) if str(values.dtype) == FP8 else values
    head = {
        "format": SOLUTION_FORMAT,
        "keys": keys,
        "specs": {key: asdict(qparams.spec) for key, qparams in solution.qparams.items()},
        "refusals": [asdict(refusal) for refusal in solution.refusals],
        "samples": solution.samples,
        "unread": [asdict(reader) for reader in sorted(solution.unread)],
        "magnitudes": list(solution.magnitudes),
        "notes": solution.notes,
        "constants": list(solution.constants),
        "gains": {key: asdict(gain) for key, gain in solution.gains.items()},
    }
    for number, values in enumerate(solution.constants.values()):
        arrays[f"constants.{number}"] = values
    for number, found in enumerate(solution.magnitudes.values()):
        arrays[f"magnitudes.{number}.octaves"] = np.stack([found.negative, found.positive])
        arrays[f"magnitudes.{number}.ends"] = np.array([found.lo, found.hi])
        arrays[f"magnitudes.{number}.counts"] = np.array([found.zeros, found.nan, found.inf, found.samples], np.int64)
    named: dict[str, Any] = {HEAD: np.frombuffer(json.dumps(head).encode(), np.uint8), **arrays}
    packed = io.BytesIO()
    np.savez_compressed(packed, **named)
    write_bytes(path, packed.getbuffer())


def _typed(values: Array, spec: QuantSpec) -> Array:
    """Restore fp8 values that were stored as bytes."""
    return values.view(spec.dtype) if spec.is_fp8 else values


def _parts(solution: Solution, key: str) -> dict[str, Array]:
    parts: dict[str, Array] = {}
    if key in solution.qparams:
        parts["scale"], parts["zero_point"] = solution.qparams[key].scale, solution.qparams[key].zero_point
    if key in solution.bounds:
        parts["lo"], parts["hi"] = solution.bounds[key].lo, solution.bounds[key].hi
    if key in solution.codes:
        parts["codes"] = solution.codes[key]
    if key in solution.bias_scales:
        parts["bias_scale"] = solution.bias_scales[key]
    return parts


def load_solution(path: Path) -> Solution:
    """Load a solution written by `save_solution`.

    Raises:
        ModelError: the file is missing, damaged, or has another format version.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            head = json.loads(bytes(file[HEAD]).decode())
            arrays = {name: file[name] for name in file.files if name != HEAD}
    except DAMAGED as error:
        raise ModelError(f"'{path}' is not a saved solution ({error}). Calibrate again.") from error
    if not isinstance(head, dict) or head.get("format") != SOLUTION_FORMAT:
        found = head.get("format") if isinstance(head, dict) else None
        raise ModelError(f"'{path}' has format {found}; this version reads {SOLUTION_FORMAT}. Calibrate again.")
    try:
        return _assemble(head, arrays)
    except KeyError as error:
        raise ModelError(f"'{path}' is not a saved solution (it lacks {error}). Calibrate again.") from error


def _assemble(head: Mapping[str, Any], arrays: Mapping[str, Array]) -> Solution:
    def part(name: str) -> dict[str, Array]:
        found = ((key, arrays.get(f"{number}.{name}")) for number, key in enumerate(head["keys"]))
        return {key: value for key, value in found if value is not None}

    scales, zeros, lows, highs = part("scale"), part("zero_point"), part("lo"), part("hi")
    specs = {key: QuantSpec(**spec) for key, spec in head["specs"].items()}
    return Solution(
        qparams={key: QParams(scales[key], _typed(zeros[key], spec), spec) for key, spec in specs.items()},
        codes={key: _typed(codes, specs[key]) if key in specs else codes for key, codes in part("codes").items()},
        bounds={key: Bounds(lows[key], highs[key]) for key in lows},
        refusals=tuple(Refusal(**row) for row in head["refusals"]),
        samples=head["samples"],
        unread=frozenset(Reader(**row) for row in head["unread"]),
        bias_scales=part("bias_scale"),
        magnitudes={name: _magnitudes(arrays, number) for number, name in enumerate(head["magnitudes"])},
        notes=tuple(head["notes"]),
        constants={name: arrays[f"constants.{number}"] for number, name in enumerate(head["constants"])},
        gains={key: Gain(**row) for key, row in head["gains"].items()},
    )


def _magnitudes(arrays: Mapping[str, Array], number: int) -> Magnitudes:
    octaves, ends, counts = (arrays[f"magnitudes.{number}.{part}"] for part in ("octaves", "ends", "counts"))
    zeros, nan, inf, samples = (int(count) for count in counts)
    return Magnitudes(float(ends[0]), float(ends[1]), octaves[0], octaves[1], zeros, nan, inf, samples)


def to_dict(plan: Plan) -> dict[str, Any]:
    """Convert a plan to plain values that ``json.dumps`` accepts."""
    return {"format": PLAN_FORMAT, **asdict(plan)}


def _given(row: Mapping[str, Any] | None) -> GivenParams | None:
    return None if row is None else GivenParams(tuple(row["scale"]), tuple(row["zero_point"]))


def from_dict(values: dict[str, Any]) -> Plan:
    """Rebuild the plan that `to_dict` wrote.

    Raises:
        RecipeError: another format, or a key is missing or unknown.
    """
    if values.get("format") != PLAN_FORMAT:
        raise RecipeError(
            f"the plan has format {values.get('format')!r}; this version reads format {PLAN_FORMAT}. Plan again."
        )
    try:
        return Plan(
            sites=tuple(
                Site(
                    **{
                        **row,
                        "spec": QuantSpec(**row["spec"]),
                        "readers": tuple(Reader(**reader) for reader in row["readers"]),
                        "observer": ObserverChoice(**row["observer"]),
                        "rounding": RoundingChoice(**row["rounding"]),
                        "fixed": None if row["fixed"] is None else tuple(row["fixed"]),
                        "given": _given(row.get("given")),
                        "follows": None if row["follows"] is None else tuple(row["follows"]),
                    }
                )
                for row in values["sites"]
            ),
            refusals=tuple(Refusal(**row) for row in values["refusals"]),
            backend=values["backend"],
            scale_rule=values["scale_rule"],
            weights=values["weights"],
            weights_alone=values["weights_alone"],
            float_type=values["float_type"],
            scales=ScaleLimits(**values["scales"]),
            cpu=values.get("cpu", ""),
        )
    except (KeyError, TypeError) as error:
        raise RecipeError(f"the plan is damaged ({error}). Plan again.") from error
