"""Train a quantized image classifier in a loop of one's own, without labels.

    python examples/cifar_qat/train.py resnet20.onnx images.npz -o resnet20_w4a4.onnx

IMAGES is a folder of image files (needs Pillow) or an .npz whose first array holds them: uint8, (N, H, W, 3). No
labels are read: the float network says what is right. Needs torch: ``pip install 'sbonnx[cpu,qat]'``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax

from sbonnx import qat

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def read_images(source: Path) -> NDArray[np.uint8]:
    """uint8 images (N, H, W, 3), all of one size."""
    if source.suffix == ".npz":
        with np.load(source) as arrays:
            images: NDArray[np.uint8] = arrays[arrays.files[0]]
    else:
        from PIL import Image

        files = sorted(path for path in source.rglob("*") if path.suffix.lower() in SUFFIXES)
        if not files:
            raise SystemExit(f"{source} holds no images: {', '.join(sorted(SUFFIXES))}")
        images = np.stack([np.asarray(Image.open(path).convert("RGB")) for path in files])
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
        raise SystemExit(f"{source}: images must be uint8 (N, H, W, 3), got {images.dtype} {images.shape}")
    return images


def normalised(images: NDArray[np.uint8], mean: list[float], std: list[float]) -> NDArray[np.float32]:
    """What the network was trained on: (N, 3, H, W) float32."""
    scaled = (images.astype(np.float32) / 255.0 - np.array(mean, np.float32)) / np.array(std, np.float32)
    return np.ascontiguousarray(scaled.transpose(0, 3, 1, 2), dtype=np.float32)


def optimizer_for(module: nn.Module, lr: float, scale_lr: float) -> torch.optim.Optimizer:
    """Two groups: weights with decay, and scales, which are few, matter much, and must not shrink."""
    scales = [parameter for _, parameter in qat.quant_parameters(module)]
    known = {id(parameter) for parameter in scales}
    weights = [parameter for parameter in module.parameters() if id(parameter) not in known]
    groups = [
        {"params": weights, "lr": lr, "weight_decay": 1e-4},
        {"params": scales, "lr": scale_lr, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Divergence of the class scores from the float network's, and their squared error."""
    divergence = kl_div(log_softmax(output, 1), log_softmax(target, 1), reduction="batchmean", log_target=True)
    return divergence + (output - target).square().mean() / target.var()


def train(module: nn.Module, images: Tensor, args: argparse.Namespace) -> None:
    """The loop. `module` is a module like any other: wrap it, log it, stop it early, as you do elsewhere."""
    teacher = qat.float_twin(module)
    optimizer = optimizer_for(module, args.lr, args.scale_lr)
    steps = args.epochs * -(-len(images) // args.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [args.lr, args.scale_lr], total_steps=max(steps, 2), pct_start=0.1
    )
    augment, chance = qat.make_augment("flip,shift"), torch.Generator().manual_seed(args.seed)
    for epoch in range(args.epochs):
        module.train()
        total = 0.0
        for places in torch.randperm(len(images), generator=chance).split(args.batch):
            (batch,) = augment({"images": images[places]}, chance).values()
            with torch.no_grad():
                (target,) = teacher(batch).values()
            (output,) = module(batch).values()
            loss = loss_of(output, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += float(loss.detach()) * len(places)
        print(f"epoch {epoch + 1}: loss {total / len(images):.4f}")
    module.eval()


def parsed(words: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="float ONNX classifier of one input (N, 3, H, W) and one output")
    parser.add_argument("images", type=Path, help="folder of images, or .npz of uint8 (N, H, W, 3)")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--input", default="input", help="name of the model's input")
    parser.add_argument("--bits", default="w4a4")
    parser.add_argument("--method", default="lsq", choices=[*qat.METHODS])
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=5e-4, help="of weights and biases")
    parser.add_argument("--scale-lr", type=float, default=1e-3, help="of scales")
    parser.add_argument("--limit", type=int, default=None, help="use the first so many images")
    parser.add_argument("--mean", type=float, nargs=3, default=list(MEAN))
    parser.add_argument("--std", type=float, nargs=3, default=list(STD))
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Calibrate, train, write. Exit code 1 where the file does not give what the module gives."""
    args = parsed(words)
    images = normalised(read_images(args.images)[: args.limit], args.mean, args.std)
    feeds: list[dict[str, Any]] = [{args.input: image[None]} for image in images]
    weights = "lsq" if args.method == "pact" else args.method  # pact clips activations
    module = qat.prepare(args.model, feeds, backend="virtual", bits=args.bits, weights=weights, activations=args.method)
    train(module, torch.from_numpy(images), args)
    report = qat.export(module, args.output, feeds[:64], force=True)
    if report.metrics is not None:
        print(f"{args.output}: {report.metrics.outputs[0].sqnr_db:.1f} dB from the float network")
    for problem in report.problems:
        print(problem)
    return int(bool(report.problems))


if __name__ == "__main__":
    raise SystemExit(main())
