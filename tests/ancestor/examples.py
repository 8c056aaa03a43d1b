"""Small networks with the module names of the ancestor's examples, as torch would have exported them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx

from tests.ancestor.exporter import Exporter
from tests.ancestor.networks import attention

WIDTH, HEADS = 16, 2


@dataclass(frozen=True)
class Names:
    """Names of the modules of a transformer.

    Attributes:
        block: of each block, with a place for its number.
        norms: the two of a block.
        last: the norm behind the blocks.
        head: the classifier.
        stem: the convolution before the blocks; "" where the input is a sequence of embeddings.
    """

    block: str = "blocks.{}"
    norms: tuple[str, str] = ("norm1", "norm2")
    last: str = "norm"
    head: str = "head"
    stem: str = "patch_embed.proj"


DEIT = Names()
BERT = Names("encoder.layer.{}", ("attn_layer_norm", "mlp_layer_norm"), "layer_norm", "classifier", "")
GPT2 = Names("h.{}", ("ln_1", "ln_2"), "ln_f", "lm_head", "")


def scope(path: str) -> str:
    """The scope of a module in node names: ``/blocks/blocks.0/attn`` for ``blocks.0.attn``."""
    parts: list[str] = []
    for part in path.split("."):
        parts.append(f"{parts[-1]}.{part}" if part.isdigit() and parts else part)
    return "/" + "/".join(parts)


def transformer(names: Names, blocks: int = 2) -> onnx.ModelProto:
    """Pre-norm blocks with fused qkv, GELU, and an Identity where a DropPath stood."""
    out = Exporter(opset=17)
    if names.stem:
        x = out.conv("x", names.stem, scope(names.stem), 3, WIDTH, 4, bias=True, stride=4)
        x = out.node("Transpose", out.reshape(x, [*out.shape(x, 0), WIDTH, -1]), perm=[0, 2, 1])
    else:
        x = "x"
    for number in range(blocks):
        module = names.block.format(number)
        at = scope(module)
        normal = out.layernorm(x, f"{module}.{names.norms[0]}", f"{at}/{names.norms[0]}", WIDTH)
        mixed = attention(out, normal, f"{at}/attn", f"{module}.attn", WIDTH, HEADS)
        x = out.node("Add", x, out.node("Identity", mixed, at=f"{at}/drop_path"), at=at)
        normal = out.layernorm(x, f"{module}.{names.norms[1]}", f"{at}/{names.norms[1]}", WIDTH)
        hidden = out.linear(normal, f"{module}.mlp.fc1", f"{at}/mlp/fc1", (WIDTH, 2 * WIDTH), std=0.2)
        active = out.gelu(hidden, f"{at}/mlp/act")
        done = out.linear(active, f"{module}.mlp.fc2", f"{at}/mlp/fc2", (2 * WIDTH, WIDTH), std=0.2)
        x = out.node("Add", x, done, at=at)
    x = out.layernorm(x, names.last, scope(names.last), WIDTH)
    if names.stem:
        x = out.node("Gather", x, out.constant(0), axis=1)
        y = out.named(out.gemm(x, names.head, scope(names.head), (WIDTH, 10), std=0.3), "y")
        return out.model({"x": ("batch", 3, 16, 16)}, {y: ("batch", 10)})
    y = out.named(out.linear(x, names.head, scope(names.head), (WIDTH, 10), std=0.3), "y")
    return out.model({"x": ("batch", 6, WIDTH)}, {y: ("batch", 6, 10)})


def detection_head() -> onnx.ModelProto:
    """A backbone of one convolution, and an MLP of three layers for boxes."""
    out = Exporter(opset=13)
    x = out.node(
        "Relu", out.conv("x", "backbone.conv1", "/backbone/conv1", 3, WIDTH, 3, bias=True, stride=2), at="/backbone"
    )
    x = out.node("Transpose", out.reshape(x, [*out.shape(x, 0), WIDTH, -1]), perm=[0, 2, 1])
    for number, width in enumerate((WIDTH, WIDTH, 4)):
        module = f"bbox_embed.layers.{number}"
        x = out.linear(x, module, f"/bbox_embed/layers.{number}", (WIDTH, width), std=0.3)
        x = out.node("Relu", x, at="/bbox_embed") if width != 4 else out.named(out.node("Sigmoid", x), "y")
    return out.model({"x": ("batch", 3, 9, 9)}, {x: ("batch", 16, 4)})


def birds_eye(stem: str, quants: Sequence[str], more: Sequence[str] = ()) -> onnx.ModelProto:
    """Image backbone, view transformer (left float), encoder with residual blocks, two task heads.

    Args:
        stem: path of the first convolution of the backbone.
        quants: modules that only mark a tensor (Identity).
        more: further encoders, by path.
    """
    out = Exporter(opset=13)
    x = out.node("Relu", out.conv("x", stem, scope(stem), 3, 8, 3, bias=True, pad=1), at="/img_backbone/relu")
    for module in quants:
        x = out.node("Identity", x, at=f"/{module}")
    x = out.conv(x, "img_view_transformer.depthnet", "/img_view_transformer/depthnet", 8, 8, 1, bias=True)
    x = out.node("Softmax", x, at="/img_view_transformer", axis=1)
    x = out.node("Mul", x, out.constant(2.0, "/shift_feature", "float32"), at="/shift_feature")
    for encoder in (*more, "bev_encoder_backbone"):
        module = f"{encoder}.layers.0.0"
        at = scope(module)
        main = out.node(
            "Relu", out.conv(x, f"{module}.conv1", f"{at}/conv1", 8, 8, 3, bias=True, pad=1), at=f"{at}/relu"
        )
        main = out.conv(main, f"{module}.conv2", f"{at}/conv2", 8, 8, 3, bias=True, pad=1)
        skip = out.conv(x, f"{module}.downsample", f"{at}/downsample", 8, 8, 1, bias=True)
        x = out.node("Relu", out.node("Add", main, skip, at=at), at=f"{at}/relu")
    for number, task in enumerate(("reg", "heatmap")):
        module = f"head.task_heads.{number}.{task}"
        at = f"/head/task_heads.{number}/{task}"
        y = out.conv(x, f"{module}.0.conv", f"{at}/{task}.0/conv", 8, 8, 3, bias=True, pad=1)
        y = out.node("Relu", y, at=f"{at}/{task}.0/activate")
        y = out.conv(y, f"{module}.1", f"{at}/{task}.1", 8, 2, 3, bias=True, pad=1)
        out.named(y, task)
    return out.model({"x": ("batch", 3, 8, 8)}, {"reg": ("batch", 2, 8, 8), "heatmap": ("batch", 2, 8, 8)})
