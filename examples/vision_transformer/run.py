"""Quantize a DeiT-style vision transformer: defaults, without SmoothQuant, and with 4-bit weights.

    python -m examples.vision_transformer.run out/

Needs torch and scikit-learn: ``pip install 'sbonnx[cpu,examples]'``.
"""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from examples.commands import Figures, command, evaluated, main, size
from examples.training import classification, export, fit

PATCH, WIDTH, HEADS, DEPTH, PIXELS, CLASSES = 2, 48, 3, 3, 8, 10


class Attention(nn.Module):
    """Multi-head self-attention with one projection for queries, keys and values, as in timm."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        count, tokens, _ = x.shape
        query, key, value = self.qkv(x).reshape(count, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        weights = (query @ key.transpose(-2, -1) * (WIDTH // HEADS) ** -0.5).softmax(-1)
        result: Tensor = self.proj((weights @ value).transpose(1, 2).reshape(count, tokens, -1))
        return result


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """DeiT: patches, a class and a distillation token, and the mean of both heads; (N, 1, 8, 8) to (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(1, WIDTH, PATCH, PATCH)
        self.tokens = nn.Parameter(torch.zeros(1, 2, WIDTH))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 2 + (PIXELS // PATCH) ** 2, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head, self.head_dist = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        patches = self.patch_embed(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.tokens.expand(image.shape[0], -1, -1), patches], 1) + self.positions
        x = self.norm(self.blocks(x))
        scores: Tensor = (self.head(x[:, 0]) + self.head_dist(x[:, 1])) / 2
        return scores


def prepare() -> None:
    """Train vit.onnx on digits of scikit-learn; write calib.npz and, with the labels of other digits, eval.npz."""
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 8 - 1).astype(np.float32).reshape(-1, 1, PIXELS, PIXELS)
    data = [torch.from_numpy(images[:1397]), torch.from_numpy(labels[:1397])]
    network = fit(VisionTransformer(), data, classification, epochs=9, batch=50, lr=3e-3)
    export(network, {"pixel_values": data[0][:2]}, ["logits"], "vit.onnx")
    np.savez("calib.npz", pixel_values=images[:64])
    np.savez("eval.npz", pixel_values=images[1397:], label=labels[1397:])


def run() -> Figures:
    """Run all steps in the current folder."""
    prepare()
    quantize = "sbonnx quantize vit.onnx --data calib.npz --split 16"
    command(f"{quantize} -o w8a8.onnx")
    command(f"{quantize} -o plain.onnx --smooth-quant false")
    command(f"{quantize} -o w4.onnx --mode weight_only --bits w4 --block-size 16")
    names = "vit.onnx w8a8.onnx plain.onnx w4.onnx"
    figures = evaluated(f"sbonnx eval {names} --data eval.npz --split 50 --metric top1")
    return figures | {"kB vit.onnx": size("vit.onnx"), "kB w8a8.onnx": size("w8a8.onnx"), "kB w4.onnx": size("w4.onnx")}


if __name__ == "__main__":
    main(run, __doc__)
