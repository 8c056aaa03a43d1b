"""Whether a file gives what the module that it was written from gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import nn

from sbonnx import graph as graphs
from sbonnx.calib.session import CPU, Session, SessionModel
from sbonnx.plan import Solution
from sbonnx.precision import emulated
from sbonnx.qat.module import Origin, unwrapped
from sbonnx.spec import Array

RARE: Final = 0.1
"""Share of values that may differ by more than `SMALL` codes: torch and onnxruntime add floats in other orders, which
now and then tips a value to the next code, and all that is computed from it goes a part of a code another way."""

SMALL: Final = 0.05

MEETING: Final = 1e-4
"""Share of values that may be up to two quanta away: in a deep network tipped codes of several layers meet there."""

ALL_FLOAT: Final = 1e-3
"""The quantum of a network in which nothing is quantized."""

FLOAT: Final = {"fp32": 1e-4, "fp16": 0.1, "bf16": 0.3}
"""By the type of what stays float in the file, the part of an output's largest value within which two computations of
it are one: 16-bit codes are finer than what sums in float32 agree to, and half floats tip 8-bit codes everywhere."""

NARROW: Final = {torch.float16: "fp16", torch.bfloat16: "bf16"}
"""What a module computes in that was cast to half, or whose graph is."""


def disagreements(
    module: nn.Module, origin: Origin, solution: Solution, path: Path, feeds: Sequence[Mapping[str, Array]]
) -> list[str]:
    """Outputs of the file that are more than one quantum away from the module's, or often away; a sentence for each.

    One value in ten thousand (`MEETING`) may be two quanta away.

    The quantum of an output is the step of its own codes; of one that stays float the largest step of the network; and
    no less than what floats agree to (`FLOAT`).

    Args:
        module: wrapped or not; it is what lies inside that computes, in eval mode: other processes are not waited for.
        solution: what was written.
        path: of the file, run by onnxruntime without optimisation; one in bfloat16 as float32 with its rounding.
        feeds: by the names of the model's inputs.

    Raises:
        DataError: a feed has another value for an input that is fixed.
    """
    steps = {
        site.tensor: float(solution.qparams[site.key].scale.max())
        for site in origin.prepared.plan.of_role("activation")
        if site.key in solution.qparams
    }
    largest = max(steps.values(), default=ALL_FLOAT)
    apart: dict[str, list[Array]] = {}
    peaks: dict[str, float] = {}
    kinds: dict[str, str] = {}
    for name, found, expected in _pairs(module, origin, path, feeds):
        wanted = expected.float().cpu().numpy()
        apart.setdefault(name, []).append(np.abs(np.asarray(found, np.float32) - wanted).reshape(-1))
        peaks[name] = max(peaks.get(name, 0.0), float(np.abs(wanted).max(initial=0.0)))
        kinds[name] = NARROW.get(expected.dtype, origin.prepared.plan.float_type)
    said = (
        _said(name, np.concatenate(parts), max(steps.get(name, largest), FLOAT[kinds[name]] * peaks[name]))
        for name, parts in apart.items()
    )
    return [sentence for sentence in said if sentence is not None]


def _pairs(
    module: nn.Module, origin: Origin, path: Path, feeds: Sequence[Mapping[str, Array]]
) -> Iterator[tuple[str, Array, torch.Tensor]]:
    """(name, what the file gives, what the module gives) of every float output on every feed."""
    inner = unwrapped(module)
    first = next(iter(inner.parameters()))
    modes = {part: part.training for part in inner.modules()}
    content = path.read_bytes()
    if origin.prepared.plan.float_type == "bf16":
        content = graphs.to_proto(emulated(graphs.load(path))).SerializeToString()
    session = Session(SessionModel(content, level="off"), [CPU], threads=1, name=str(path))
    types = {spec.name: spec.dtype for spec in session.input_specs}
    try:
        inner.eval()
        for feed in feeds:
            given = {name: _placed(value, first) for name, value in origin.feed(feed).items()}
            expected = inner(**given)
            typed = {name: np.asarray(value, types.get(name)) for name, value in feed.items()}
            for name, found in session.run(typed).items():
                if name in expected and expected[name].is_floating_point():
                    yield name, found, expected[name]
    finally:
        session.close()
        for part, mode in modes.items():
            part.training = mode


def _placed(value: Array, like: torch.Tensor) -> torch.Tensor:
    """An input where the module is; float32 in the module's own type, should it have been cast to another."""
    made = torch.from_numpy(np.array(value)).to(like.device)
    return made.to(like.dtype) if made.dtype == torch.float32 else made


def _said(name: str, away: Array, quantum: float) -> str | None:
    """What is wrong with an output, or None."""
    most, often = float(away.max(initial=0.0)), float((away > SMALL * quantum).mean()) if away.size else 0.0
    beyond = float((away > 1.001 * quantum).mean()) if away.size else 0.0
    if often <= RARE and (beyond == 0.0 or (beyond <= MEETING and most <= 2.0 * quantum)):
        return None
    return (
        f"output '{name}' of the file is up to {most:.3g} away from the module's ({often:.1%} of its values; "
        f"{quantum:.3g} is what rounding explains)"
    )
