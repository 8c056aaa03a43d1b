"""The networks of the ancestor's tests, as torch would have exported them, with seeded weights."""

from __future__ import annotations

import numpy as np
import onnx

from tests.ancestor.exporter import INT64, Exporter

DEIT_WIDTH, DEIT_HEADS, DEIT_BLOCKS = 192, 3, 12

RESNET18 = ((64, 1), (128, 2), (256, 2), (512, 2))
RESNET20 = ((16, 1), (32, 2), (64, 2))


def attention(out: Exporter, x: str, at: str, module: str, width: int, heads: int) -> str:
    """timm's attention before it used the fused operator: qkv in one Linear, cut apart by position, sizes computed."""
    batch, tokens, size = out.shape(x, 0, 1, 2, at=at)
    qkv = out.linear(x, f"{module}.qkv", f"{at}/qkv", (width, 3 * width), std=0.05)
    per_head = out.node("Div", size, out.constant(heads, at), at=at)
    parts = out.reshape(qkv, [batch, tokens, 3, heads, per_head], at)
    parts = out.node("Transpose", parts, at=at, perm=[2, 0, 3, 1, 4])
    query, key, value = (out.node("Gather", parts, out.constant(i, at), at=at, axis=0) for i in range(3))
    scores = out.node("MatMul", query, out.node("Transpose", key, at=at, perm=[0, 1, 3, 2]), at=at)
    scaled = out.node("Mul", scores, out.constant((width // heads) ** -0.5, at, np.float32), at=at)
    weights = out.node("Softmax", scaled, at=at, axis=-1)
    mixed = out.node("MatMul", weights, value, at=at)
    joined = out.reshape(out.node("Transpose", mixed, at=at, perm=[0, 2, 1, 3]), [batch, tokens, size], at)
    return out.linear(joined, f"{module}.proj", f"{at}/proj", (width, width), std=0.05)


def mhsa() -> onnx.ModelProto:
    """Self-attention of width 192 with 3 heads and a bias on q, k and v: (1, 197, 192) to the same."""
    out = Exporter(opset=13)
    y = out.named(attention(out, "x", "", "attn", DEIT_WIDTH, DEIT_HEADS), "y")
    return out.model({"x": (1, 197, DEIT_WIDTH)}, {y: (1, 197, DEIT_WIDTH)})


def _class_token(out: Exporter, batch: str) -> str:
    """``cls_token.expand(batch, -1, -1)``, the way of the exporter to say -1: where a size equals -1, take 1."""
    token = out.normal("cls_token", 1, 1, DEIT_WIDTH, std=0.2)
    axis = out.constant([0])
    asked = out.node("Concat", out.node("Unsqueeze", batch, axis), out.constant([-1]), out.constant([-1]), axis=0)
    ones = out.node(
        "ConstantOfShape",
        out.node("Shape", out.constant([1, 1, 1])),
        value=onnx.numpy_helper.from_array(np.ones(1, np.int64)),
    )
    minus = out.node("Mul", ones, out.constant(-1))
    return str(out.node("Expand", token, out.node("Where", out.node("Equal", asked, minus), ones, asked)))


def deit_tiny(image: int = 224, patch: int = 16) -> onnx.ModelProto:
    """A patch embedding, a class token, 12 blocks of width 192, a head of 1000 classes, at opset 13: norms unrolled."""
    out = Exporter(opset=13)
    tokens = (image // patch) ** 2 + 1
    patches = out.conv("x", "patch_embed.proj", "/patch_embed/proj", 3, DEIT_WIDTH, patch, bias=True, stride=patch)
    shape = out.node("Shape", patches, at="/patch_embed")
    start, end, axis = (out.constant([i], "/patch_embed") for i in (0, 2, 0))
    kept = out.node("Slice", shape, start, end, axis, at="/patch_embed")  # flatten(2) of a tensor of unknown size
    flat = out.node("Concat", kept, out.constant([-1], "/patch_embed"), at="/patch_embed", axis=0)
    flat = out.node("Reshape", patches, flat, at="/patch_embed")
    x = out.node("Transpose", flat, at="/patch_embed", perm=[0, 2, 1])
    (batch,) = out.shape(x, 0)
    x = out.node("Concat", _class_token(out, batch), x, axis=1)
    x = out.node("Add", x, out.normal("pos_embed", 1, tokens, DEIT_WIDTH, std=0.2))
    for index in range(DEIT_BLOCKS):
        at, module = f"/blocks/blocks.{index}", f"blocks.{index}"
        normal = out.layernorm(x, f"{module}.norm1", f"{at}/norm1", DEIT_WIDTH)
        x = out.node("Add", x, attention(out, normal, f"{at}/attn", f"{module}.attn", DEIT_WIDTH, DEIT_HEADS), at=at)
        normal = out.layernorm(x, f"{module}.norm2", f"{at}/norm2", DEIT_WIDTH)
        hidden = out.linear(normal, f"{module}.mlp.fc1", f"{at}/mlp/fc1", (DEIT_WIDTH, 4 * DEIT_WIDTH), std=0.05)
        active = out.gelu(hidden, f"{at}/mlp/act")
        x = out.node(
            "Add",
            x,
            out.linear(active, f"{module}.mlp.fc2", f"{at}/mlp/fc2", (4 * DEIT_WIDTH, DEIT_WIDTH), std=0.05),
            at=at,
        )
    x = out.node("Gather", out.layernorm(x, "norm", "/norm", DEIT_WIDTH), out.constant(0), axis=1)
    y = out.named(out.gemm(x, "head", "/head", (DEIT_WIDTH, 1000)), "logits")
    return out.model({"x": ("batch", 3, image, image)}, {y: ("batch", 1000)})


def qadd() -> onnx.ModelProto:
    """Two convolutions of one input of 8 channels, added."""
    out = Exporter(opset=13)
    one = out.conv("x", "conv1", "/conv1", 8, 8, 3, bias=True, pad=1)
    other = out.conv("x", "conv2", "/conv2", 8, 8, 3, bias=True, pad=1)
    return out.model({"x": (1, 8, 16, 16)}, {out.named(out.node("Add", one, other), "y"): (1, 8, 16, 16)})


def _conv_bn(
    out: Exporter, x: str, at: tuple[str, str], names: tuple[str, str], sizes: tuple[int, int], kernel: int, stride: int
) -> str:
    """A convolution without bias and its BatchNorm2d. `at` are the scopes, `names` the parameters' modules."""
    x = out.conv(x, names[0], at[0], *sizes, kernel, stride=stride, pad=kernel // 2)
    return out.batchnorm(x, names[1], at[1], sizes[1])


def _basic_block(out: Exporter, x: str, module: str, sizes: tuple[int, int], stride: int, projected: bool) -> str:
    """torchvision's BasicBlock; where the shape changes, a projection or (CIFAR) every other pixel, padded."""
    at = "/" + module.split(".")[0] + "/" + module
    main = x
    for number, (pair, step) in enumerate((((sizes[0], sizes[1]), stride), ((sizes[1], sizes[1]), 1)), 1):
        scopes, names = (f"{at}/conv{number}", f"{at}/bn{number}"), (f"{module}.conv{number}", f"{module}.bn{number}")
        main = _conv_bn(out, main, scopes, names, pair, 3, step)
        if number == 1:
            main = out.node("Relu", main, at=f"{at}/relu")
    if stride != 1 and projected:
        scopes = (f"{at}/downsample/downsample.0", f"{at}/downsample/downsample.1")
        x = _conv_bn(out, x, scopes, (f"{module}.downsample.0", f"{module}.downsample.1"), sizes, 1, stride)
    elif stride != 1:
        begins, ends = out.constant([0, 0], at), out.constant([2**63 - 1] * 2, at)
        x = out.node("Slice", x, begins, ends, out.constant([2, 3], at), out.constant([2, 2], at), at=at)
        more = (sizes[1] - sizes[0]) // 2
        pads = out.constant([0, more, 0, 0, 0, more, 0, 0], at)
        x = out.node("Pad", x, pads, out.constant(0.0, at, np.float32), at=at, mode="constant")
    return str(out.node("Relu", out.node("Add", main, x, at=at), at=f"{at}/relu"))


def resnet18(image: int = 64) -> onnx.ModelProto:
    """torchvision's ResNet-18, batch norms unfused."""
    out = Exporter(opset=13)
    x = _conv_bn(out, "input", ("/conv1", "/bn1"), ("conv1", "bn1"), (3, 64), 7, 2)
    x = out.node("Relu", x, at="/relu")
    x = out.node("MaxPool", x, at="/maxpool", ceil_mode=0, kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2])
    width = 64
    for stage, (channels, stride) in enumerate(RESNET18, 1):
        for block in range(2):
            x = _basic_block(out, x, f"layer{stage}.{block}", (width, channels), stride if block == 0 else 1, True)
            width = channels
    x = out.node("Flatten", out.node("GlobalAveragePool", x, at="/avgpool"), axis=1)
    y = out.named(out.gemm(x, "fc", "/fc", (512, 1000), std=0.05), "output")
    return out.model({"input": ("batch", 3, image, image)}, {y: ("batch", 1000)})


def resnet20() -> onnx.ModelProto:
    """ResNet-20 for CIFAR with parameter-free shortcuts, batch norms unfused."""
    out = Exporter(opset=13)
    x = _conv_bn(out, "input", ("/conv1", "/bn1"), ("conv1", "bn1"), (3, 16), 3, 1)
    x = out.node("Relu", x, at="/relu")
    width = 16
    for stage, (channels, stride) in enumerate(RESNET20, 1):
        for block in range(3):
            x = _basic_block(out, x, f"layer{stage}.{block}", (width, channels), stride if block == 0 else 1, False)
            width = channels
    x = out.node("Flatten", out.node("GlobalAveragePool", x, at="/avgpool"), axis=1)
    y = out.named(out.gemm(x, "linear", "/linear", (64, 10), std=0.2), "output")
    return out.model({"input": ("batch", 3, 32, 32)}, {y: ("batch", 10)})


def bert_embeddings(length: int | str = 32, vocabulary: int = 1000, width: int = 64) -> onnx.ModelProto:
    """Words, token types and positions, added and normalised; a `length` in letters is a dynamic axis."""
    out = Exporter(opset=13)
    at = "/embeddings"
    rows = {"word_embeddings": vocabulary, "token_type_embeddings": 2, "position_embeddings": 64}
    tables = {name: out.normal(f"embeddings.{name}.weight", count, width, std=0.5) for name, count in rows.items()}
    words = out.node("Gather", tables["word_embeddings"], "input_ids", at=f"{at}/word_embeddings")
    types = out.node("Gather", tables["token_type_embeddings"], "token_type_ids", at=f"{at}/token_type_embeddings")
    both = out.node("Add", words, types, at=at)
    (tokens,) = out.shape("input_ids", 1, at=at)
    zero, one = out.constant([0], at), out.constant([1], at)
    ends = out.node("Unsqueeze", tokens, zero, at=at)
    ids = out.node("Slice", out.constant(np.arange(64)[None], at), zero, ends, one, one, at=at)
    positions = out.node("Gather", tables["position_embeddings"], ids, at=f"{at}/position_embeddings")
    total = out.node("Add", both, positions, at=at)
    y = out.named(out.layernorm(total, "embeddings.LayerNorm", f"{at}/LayerNorm", width, 1e-12), "y")
    return out.model({"input_ids": (1, length), "token_type_ids": (1, length)}, {y: (1, length, width)}, kind=INT64)


def residual_block() -> onnx.ModelProto:
    """conv-BN-ReLU-conv-BN, added to a convolution of the same input, ReLU, global pool, classifier."""
    out = Exporter(opset=13)
    main = _conv_bn(out, "x", ("/conv1", "/bn1"), ("conv1", "bn1"), (3, 8), 3, 1)
    main = out.node("Relu", main, at="/relu1")
    main = _conv_bn(out, main, ("/conv2", "/bn2"), ("conv2", "bn2"), (8, 8), 3, 1)
    total = out.node("Add", main, out.conv("x", "skip", "/skip", 3, 8, 1, bias=True))
    x = out.node("GlobalAveragePool", out.node("Relu", total, at="/relu2"), at="/gap")
    y = out.named(out.gemm(out.node("Flatten", x, axis=1), "fc", "/fc", (8, 10), std=0.3), "y")
    return out.model({"x": ("batch", 3, 8, 8)}, {y: ("batch", 10)})
