"""A small trained mixture of experts: `python -m benchmarks.llm.toy_mixture FOLDER`.

The decoder of the pack (`classics_llama`) with each MLP of 384 channels replaced by 8 experts of 96, of which 2 are
active. Experts begin as channels of the MLP and learn the output probabilities of the decoder on text that it writes
itself, 1.5 M parameters. Deterministic on one machine. FOLDER gets a subfolder for each of `FORMS`, all with the same
weights.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper

from benchmarks.results import PACK
from sbonnx.spec import Array

EXPERTS: Final = 8
ACTIVE: Final = 2
INNER: Final = 96
LAYERS: Final = 4
HEADS: Final = 4
CACHED: Final = 2
"""Heads of keys and values."""
HIDDEN: Final = 128
HEAD: Final = HIDDEN // HEADS

WRITTEN: Final = 512
"""Windows that the float decoder writes; each begins with a part of a calibration window."""
BEGIN: Final = 16
LENGTH: Final = 192
STEPS: Final = 200
BATCH: Final = 8
BALANCE: Final = 0.01
"""Weight of the loss that balances the load of the experts (Fedus et al. 2021, "Switch Transformers", equation 4)."""

FORMS: Final = ("operator", "gathered", "masked")
"""com.microsoft.MoE; each expert on the tokens routed to it, as a loop over experts is traced; on all tokens times a
mask."""

Weights = dict[str, Any]


def float_weights(model: onnx.ModelProto) -> dict[str, Array]:
    """Return the initializers of the float decoder by name, without "model." in front."""
    return {
        tensor.name.removeprefix("model."): numpy_helper.to_array(tensor).astype(np.float32)
        for tensor in model.graph.initializer
    }


def written_text(path: Path, begins: Array, seed: int) -> Array:
    """Continue rows of tokens (n, BEGIN) to windows by samples of the decoder's probabilities."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(seed)
    count = len(begins)
    ids = begins
    feed: dict[str, Array] = {
        f"past_key_values.{layer}.{kind}": np.zeros((count, CACHED, 0, HEAD), np.float32)
        for layer in range(LAYERS)
        for kind in ("key", "value")
    }
    fresh = ids
    names = [output.name for output in session.get_outputs()]
    while ids.shape[1] < LENGTH:
        mask = np.ones(ids.shape, np.int64)
        values = dict(zip(names, session.run(None, {"input_ids": fresh, "attention_mask": mask, **feed}), strict=True))
        logits = values.pop("logits")[:, -1].astype(np.float64)
        chosen = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
        fresh = chosen[:, None]
        ids = np.concatenate([ids, fresh], axis=1)
        feed = {name.replace("present", "past_key_values"): array for name, array in values.items()}
    return ids


def norm(x: Any, gain: Any) -> Any:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * gain


def attention(x: Any, weights: Weights, layer: int) -> Any:
    """Compute causal grouped attention with rotary positions."""
    import torch
    from torch.nn import functional

    batch, length, _ = x.shape
    wide = (x @ weights[f"layers.{layer}.attn.qkv_proj.MatMul.weight"]).view(batch, length, -1, HEAD).transpose(1, 2)
    q, k, v = wide.split([HEADS, CACHED, CACHED], dim=1)
    cos, sin = weights["cos_cache"][:length], weights["sin_cache"][:length]

    def turned(part: Any) -> Any:
        first, second = part.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    y = functional.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True, enable_gqa=True)
    return y.transpose(1, 2).reshape(batch, length, -1) @ weights[f"layers.{layer}.attn.o_proj.MatMul.weight"]


def mlp(x: Any, weights: Weights, layer: int) -> Any:
    """Compute the MLP of the float decoder."""
    from torch.nn import functional

    gate, up, down = (weights[f"layers.{layer}.mlp.{name}_proj.MatMul.weight"] for name in ("gate", "up", "down"))
    return (functional.silu(x @ gate) * (x @ up)) @ down


def mixture(x: Any, weights: Weights, layer: int, losses: list[Any]) -> Any:
    """Compute the active experts of each token, weighted by the router; append the balance loss."""
    import torch
    from torch.nn import functional

    rows = x.reshape(-1, HIDDEN)
    chances = (rows @ weights[f"layers.{layer}.router"]).softmax(dim=-1)
    best = chances.topk(ACTIVE, dim=-1)
    gates = torch.zeros_like(chances).scatter(1, best.indices, best.values / best.values.sum(-1, keepdim=True))
    losses.append(EXPERTS * ((gates > 0).float().mean(0) / ACTIVE * chances.mean(0)).sum())
    gate, up, down = (weights[f"layers.{layer}.experts.{name}"] for name in ("gate", "up", "down"))
    total = torch.zeros_like(rows)
    for expert in range(EXPERTS):
        tokens = gates[:, expert].nonzero()[:, 0]
        some = rows[tokens]
        y = (functional.silu(some @ gate[expert]) * (some @ up[expert])) @ down[expert]
        total = total.index_add(0, tokens, y * gates[tokens, expert, None])
    return total.view_as(x)


Part = Callable[[Any, Weights, int], Any]
"""Part of a block: its input after the norm, all weights and the number of the block."""


def logits_of(ids: Any, weights: Weights, feed_forward: Part = mlp, attend: Part = attention) -> Any:
    """Compute the logits of windows of tokens."""
    head = weights["lm_head.MatMul.weight"]
    x = head.T[ids]
    for layer in range(LAYERS):
        x = x + attend(norm(x, weights[f"layers.{layer}.input_layernorm.weight"]), weights, layer)
        x = x + feed_forward(norm(x, weights[f"layers.{layer}.post_attention_layernorm.weight"]), weights, layer)
    return norm(x, weights[f"layers.{LAYERS}.final_norm_layernorm.weight"]) @ head


def initial(weights: dict[str, Array]) -> dict[str, Array]:
    """Replace each MLP by experts that have some of its channels, and a router of small weights."""
    rng = np.random.default_rng(0)
    added = {name: values for name, values in weights.items() if ".mlp." not in name}
    for layer in range(LAYERS):
        places = [rng.permutation(384)[:INNER] for _ in range(EXPERTS)]
        gate, up, down = (weights[f"layers.{layer}.mlp.{name}_proj.MatMul.weight"] for name in ("gate", "up", "down"))
        added[f"layers.{layer}.experts.gate"] = np.stack([gate[:, place] for place in places])
        added[f"layers.{layer}.experts.up"] = np.stack([up[:, place] for place in places])
        added[f"layers.{layer}.experts.down"] = np.stack([2 * down[place] for place in places])
        added[f"layers.{layer}.router"] = rng.standard_normal((HIDDEN, EXPERTS), np.float32) * np.float32(0.1)
    return added


def train(
    weights: dict[str, Array],
    begin: dict[str, Array],
    logits: Callable[[Any, Weights, list[Any]], Any],
    windows: Array,
    steps: int = STEPS,
) -> dict[str, Array]:
    """Train a decoder to the probabilities of the float decoder on windows of tokens.

    Args:
        weights: of the float decoder.
        begin: first weights of the trained one.
        logits: computes its logits from ids and weights, and appends further losses.
    """
    import torch
    from torch.nn import functional

    torch.manual_seed(0)
    torch.set_num_threads(1)
    teacher = {name: torch.from_numpy(values) for name, values in weights.items()}
    fixed = ("cos_cache", "sin_cache")
    student = {
        name: torch.from_numpy(values.copy()).requires_grad_(name not in fixed) for name, values in begin.items()
    }
    optimizer = torch.optim.Adam([tensor for tensor in student.values() if tensor.requires_grad], betas=(0.9, 0.98))
    order = np.random.default_rng(1)
    began = time.process_time()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 30) * (1 - step / steps)
        ids = torch.from_numpy(windows[order.integers(len(windows), size=BATCH)])
        with torch.no_grad():
            aim = logits_of(ids, teacher).log_softmax(-1)
        losses: list[Any] = []
        predicted = logits(ids, student, losses).log_softmax(-1)
        kl = functional.kl_div(predicted, aim, log_target=True, reduction="sum") / ids.numel()
        optimizer.zero_grad()
        (kl + BALANCE * sum(losses)).backward()
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: KL {kl.item():.4f}, {time.process_time() - began:.0f} CPU s", flush=True)
    return {name: tensor.detach().numpy() for name, tensor in student.items()}


class _Body:
    """Nodes and constants that replace an MLP."""

    def __init__(self, stem: str) -> None:
        self.stem = stem
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, Array] = {}

    def constant(self, name: str, values: Any) -> str:
        self.constants[f"{self.stem}.{name}"] = np.asarray(values)
        return f"{self.stem}.{name}"

    def node(self, op: str, *inputs: str, count: int = 1, **attributes: Any) -> Any:
        name = f"/{self.stem}/{op}_{len(self.nodes)}"
        outputs = [f"{name}/output_{at}" for at in range(count)]
        domain = "com.microsoft" if op == "MoE" else ""
        self.nodes.append(helper.make_node(op, list(inputs), outputs, name, domain=domain, **attributes))
        return outputs[0] if count == 1 else outputs


def body_of(form: str, x: str, output: str, weights: dict[str, Array], layer: int) -> _Body:
    """Return the nodes of a mixture in one of `FORMS`."""
    body = _Body(f"layers.{layer}.moe")
    node, constant = body.node, body.constant
    gate, up, down = (weights[f"layers.{layer}.experts.{name}"] for name in ("gate", "up", "down"))
    scores = node("MatMul", x, constant("router", weights[f"layers.{layer}.router"]))
    scores = node("Reshape", scores, constant("scores_shape", np.array([-1, EXPERTS])))
    if form == "operator":
        fused = np.stack([gate, up], axis=-1).reshape(EXPERTS, HIDDEN, 2 * INNER).transpose(0, 2, 1)
        inputs = [constant("fc1", np.ascontiguousarray(fused)), ""]
        inputs.append(constant("fc2", np.ascontiguousarray(down.transpose(0, 2, 1))))
        swiglu: dict[str, Any] = {"activation_type": "swiglu", "swiglu_fusion": 1, "activation_alpha": 1.0}
        swiglu |= {"activation_beta": 0.0}
        node("MoE", x, scores, *inputs, k=ACTIVE, normalize_routing_weights=1, **swiglu)
        body.nodes[-1].output[0] = output
        return body
    rows = node("Reshape", x, constant("rows_shape", np.array([-1, HIDDEN])))
    chances = node("Softmax", scores, axis=-1)
    best, places = node("TopK", chances, constant("active", np.array([ACTIVE])), count=2)
    best = node("Div", best, node("ReduceSum", best, constant("last", np.array([-1])), keepdims=1))
    total = node("Sub", rows, rows)
    if form == "masked":
        gates = node("ScatterElements", node("Sub", chances, chances), places, best, axis=1)
    for expert in range(EXPERTS):
        number = constant(f"{expert}.number", np.array([expert]))
        some, factor = rows, ""
        if form == "masked":
            factor = node("Gather", gates, number, axis=1)
        else:
            where = node("NonZero", node("Equal", places, number))
            pairs = node("Transpose", where, perm=[1, 0])
            tokens = node("Gather", where, constant("first", np.array(0)), axis=0)
            factor = node("Unsqueeze", node("GatherND", best, pairs), constant("after", np.array([1])))
            some = node("Gather", rows, tokens, axis=0)
        opened = node("MatMul", some, constant(f"{expert}.gate", gate[expert]))
        opened = node("Mul", opened, node("Sigmoid", opened))
        inner = node("Mul", opened, node("MatMul", some, constant(f"{expert}.up", up[expert])))
        y = node("Mul", node("MatMul", inner, constant(f"{expert}.down", down[expert])), factor)
        if form == "masked":
            total = node("Add", total, y)
        else:
            index = node("Unsqueeze", tokens, constant("after", np.array([1])))
            total = node("ScatterND", total, index, y, reduction="add")
    node("Reshape", total, node("Shape", x))
    body.nodes[-1].output[0] = output
    return body


def with_mixtures(model: onnx.ModelProto, weights: dict[str, Array], form: str) -> onnx.ModelProto:
    """Return the float decoder with these weights, and its MLPs replaced by mixtures."""
    written = onnx.ModelProto()
    written.CopyFrom(model)
    graph = written.graph
    del graph.node[:], graph.initializer[:]
    constants = {name: values for name, values in weights.items() if "experts" not in name and "router" not in name}
    prefix = {"cos_cache": "", "sin_cache": "", "lm_head.MatMul.weight": ""}
    constants = {prefix.get(name, "model.") + name: values for name, values in constants.items()}
    for node in model.graph.node:
        if "/mlp/" not in node.name:
            graph.node.append(node)
        elif node.name.endswith("down_proj/MatMul"):
            layer = int(node.name.split("layers.")[1].split("/")[0])
            x = f"/model/layers.{layer}/post_attention_layernorm/output_0"
            body = body_of(form, x, node.output[0], weights, layer)
            graph.node.extend(body.nodes)
            constants |= body.constants
    graph.initializer.extend(numpy_helper.from_array(values, name) for name, values in constants.items())
    return written


def main() -> int:
    """Train the mixture, and write it in every form."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder to write")
    target = parser.parse_args().folder
    source = PACK / "classics_llama" / "genai"
    model = onnx.load(source / "model.onnx")
    weights = float_weights(model)
    target.mkdir(parents=True, exist_ok=True)

    def logits(ids: Any, some: Weights, losses: list[Any]) -> Any:
        return logits_of(ids, some, partial(mixture, losses=losses))

    trained = train(weights, initial(weights), logits, training_windows(source))
    for form in FORMS:
        folder = target / form
        shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("model.onnx*"))
        onnx.save(with_mixtures(model, trained, form), folder / "model.onnx")
    return 0


def training_windows(source: Path) -> Array:
    """Return the calibration windows, and windows that the float decoder writes."""
    with np.load(PACK / "classics_llama" / "calib.npz") as arrays:
        calibration = arrays["ids"].astype(np.int64)
    begins = calibration[:, : LENGTH - LENGTH % BEGIN].reshape(-1, BEGIN)
    begins = begins[np.random.default_rng(2).permutation(len(begins))]
    count = 256
    parts = [
        written_text(source / "model.onnx", begins[np.arange(at, at + count) % len(begins)], at)
        for at in range(0, WRITTEN, count)
    ]
    return np.concatenate([calibration, *parts])


if __name__ == "__main__":
    raise SystemExit(main())
