"""One of the processes of `test_distributed`: trains its half of each batch, and writes down what it has.

Arguments: folder, rank, count of processes. In the folder: module.pt, feeds.npz, and the file where they meet.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as distributed
from torch.nn.parallel import DistributedDataParallel

from sbonnx import qat
from sbonnx.training.loop import freeze_norms

STEPS = 3
RATE = 0.01
PATIENCE = timedelta(seconds=60)


def steps(module: Any, x: Any, target: Any) -> dict[str, Any]:
    """Gradients of the first step by name; `module` is trained in place, by plain descent."""
    first: dict[str, Any] = {}
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (module(x=x)["y"] - target).square().mean().backward()
        first = first or {
            name.removeprefix("module."): one.grad.clone() for name, one in module.named_parameters()
        }  # all have one: a parameter without a gradient is an error here
        optimizer.step()
    return first


def begun(folder: Path, case: str) -> Any:
    """The module as it was handed over, in train mode; its batch norms keep their statistics, or do not."""
    module = torch.load(folder / f"{case.split()[0]}.pt", weights_only=False).train()
    freeze_norms(module, frozen=case.endswith("frozen"))
    return module


def main(folder: Path, rank: int, world: int, *cases: str) -> None:
    """Every case, one after the other, in one group of processes."""
    torch.set_num_threads(1)
    meeting = f"file://{folder / 'meeting'}"
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world, timeout=PATIENCE)
    try:
        with np.load(folder / "feeds.npz") as feeds:
            x, target = (torch.from_numpy(feeds[name][rank::world].copy()) for name in ("x", "target"))
            whole = {"x": feeds["x"]}
        for case in cases:
            module = DistributedDataParallel(begun(folder, case))
            gradients = steps(module, x, target)
            module.eval()
            torch.save((gradients, module.module.state_dict()), folder / f"{case}_{rank}.pt")
            if rank == 0:
                report = qat.export(module, folder / f"{case}.onnx", [whole])
                assert not [one for one in report.problems if "differs from that of the module" in one], report.problems
            distributed.barrier()
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
    sys.stdout.flush()
    os._exit(0)  # all is written; on a busy machine, a thread of gloo may abort the process as the interpreter ends
