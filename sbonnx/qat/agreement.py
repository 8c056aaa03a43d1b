"""Whether a file gives what the module that it was written from gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import nn

from sbonnx.calib.session import CPU, Session, SessionModel
from sbonnx.plan import Solution
from sbonnx.qat.module import Origin
from sbonnx.spec import Array

RARE: Final = 0.1
"""Share of values that may differ by more than `SMALL` codes: torch and onnxruntime add floats in other orders, which
now and then tips a value to the next code, and all that is computed from it goes a part of a code another way."""

SMALL: Final = 0.05

ALL_FLOAT: Final = 1e-3
"""The quantum of a network in which nothing is quantized."""


def disagreements(
    module: nn.Module, origin: Origin, solution: Solution, path: Path, feeds: Sequence[Mapping[str, Array]]
) -> list[str]:
    """Outputs of the file that are more than one quantum away from the module's, or often away; a sentence for each.

    The quantum of an output is the step of its own codes; of one that stays float the largest step of the network.

    Args:
        module: in eval mode.
        solution: what was written.
        path: of the file, run by onnxruntime without optimisation.
        feeds: by the names of the model's inputs.
    """
    steps = {
        site.tensor: float(solution.qparams[site.key].scale.max())
        for site in origin.prepared.plan.of_role("activation")
        if site.key in solution.qparams
    }
    largest = max(steps.values(), default=ALL_FLOAT)
    device = next(iter(module.parameters())).device
    apart: dict[str, list[Array]] = {}
    model = SessionModel(path.read_bytes(), level="off")
    session = Session(model, [CPU], threads=1, name=str(path))
    try:
        for feed in feeds:
            given = {
                origin.inputs.get(name, name): torch.from_numpy(np.array(value)).to(device)
                for name, value in feed.items()
            }
            expected = module(**given)
            for name, value in session.run(feed).items():
                if name in expected and expected[name].is_floating_point():
                    away = np.abs(np.asarray(value, np.float32) - expected[name].float().cpu().numpy())
                    apart.setdefault(name, []).append(away.reshape(-1))
    finally:
        session.close()
    return [
        said
        for name, parts in apart.items()
        if (said := _said(name, np.concatenate(parts), steps.get(name, largest))) is not None
    ]


def _said(name: str, away: Array, quantum: float) -> str | None:
    """What is wrong with an output, or None."""
    most, often = float(away.max(initial=0.0)), float((away > SMALL * quantum).mean()) if away.size else 0.0
    if most <= 1.001 * quantum and often <= RARE:
        return None
    return (
        f"output '{name}' of the file is up to {most:.3g} away from the module's ({often:.1%} of its values; "
        f"one code is {quantum:.3g})"
    )
