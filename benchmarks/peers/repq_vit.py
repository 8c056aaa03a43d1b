"""RepQ-ViT's own program on the network of `benchmarks.lowbit.vit_network`: its `test_quant.main` runs unchanged.

    python -m benchmarks.peers.repq_vit '{"code": "RepQ-ViT/classification", "folder": ..., "w_bit": 4, ...}'

Its modules that build timm networks and read ImageNet are replaced by the network and images of the folder, and its
validation by one that keeps the predicted class of each image (key "output").
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from benchmarks.lowbit.vit_network import MatMul, trained
from benchmarks.peers.measured import Job, job, tell

BATCH = 500


def quantize(wanted: Job) -> list[Any]:
    """Run the program up to its validation; return the quantized network."""
    folder = Path(wanted["folder"])
    networks: list[Any] = []
    calibration = torch.from_numpy(np.load(folder / "calib.npz")["image"][: wanted["count"]])

    def validate(args: Any, images: Any, network: Any, loss: Any, device: Any) -> tuple[float, float, float]:
        networks.append(network)
        return 0.0, 0.0, 0.0

    utils, build = ModuleType("utils"), ModuleType("utils.build_model")
    vars(utils).update(
        build_dataset=lambda args: ([(calibration, None)], None), build_model=lambda name: trained(folder)
    )
    vars(build).update(MatMul=MatMul)
    sys.modules.update({"utils": utils, "utils.build_model": build})
    sys.path.insert(0, wanted["code"])
    program: Any = importlib.import_module("test_quant")
    widths = {"w_bits": wanted["w_bit"], "a_bits": wanted["a_bit"]}
    program.args = argparse.Namespace(model="deit_small", device="cpu", seed=0, **widths)
    program.validate = validate
    program.main()
    return networks


def predicted(network: torch.nn.Module, folder: Path, count: int) -> Any:
    """Return the predicted classes of the first images."""
    images = torch.from_numpy(np.load(folder / "eval.npz")["image"][:count])
    with torch.no_grad():
        return torch.cat([network(batch).argmax(1) for batch in images.split(BATCH)]).numpy()


def main() -> int:
    """Quantize, print the cost and write the predictions."""
    wanted = job()
    torch.set_num_threads(1)
    networks: list[Any] = []
    tell(lambda: networks.extend(quantize(wanted)))
    np.save(wanted["output"], predicted(networks[0], Path(wanted["folder"]), wanted["images"]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
