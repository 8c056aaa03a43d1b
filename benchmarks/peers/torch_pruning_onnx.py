"""torch-pruning: `python -m benchmarks.peers.torch_pruning_onnx '{"method": ...}'` by its own Python.

Methods: magnitude (L2 norm of the weights of a group), taylor (weight times gradient) and hessian (squared weight
times squared gradient of a sample). Gradients need labels; here these are the classes that the float network predicts.
``scope``: "local" removes the same share of each group, "global" ranks the channels of all groups together. ``share``
is the share of the multiplications that may remain: the least ratio that meets it is taken.

The ONNX file becomes a torch module by `sbonnx.torchnet.onnx_to_torch`, and its convolutions, fully connected layers
and batch norms become torch's own modules, the only ones that torch-pruning knows. Layers whose outputs reach an output
of the model or a Pad (zero-padded shortcuts, which it cannot follow) are ignored layers. Statistics of batch norms are
measured again on the pruned network, and torch.onnx writes the file.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import networkx
import numpy as np
import torch
from torch import fx, nn

from benchmarks.peers import measured
from sbonnx import graph as graphs
from sbonnx.torchnet import Call
from sbonnx.torchnet.onnx_to_torch.reimport import META, reimport

STEPS: Final = 7
"""Bisections of the ratio."""

MOST: Final = 0.9
"""Largest ratio of a layer with global ranking, which otherwise removes whole layers."""

BATCH: Final = 64
"""Samples of a batch whose statistics are measured."""

SAME: Final = 1e-3
"""Difference of a file from the torch module, relative to the largest output."""

ROOTS: Final = (nn.Conv2d, nn.Linear)


def prune(job: measured.Job, samples: measured.Feeds) -> None:
    """Prune the float file to a share of its multiplications and save the result, on one thread."""
    torch.set_num_threads(1)
    net = torch_layers(Path(job["model"]))
    inputs = [tuple(torch.from_numpy(value) for value in feed.values()) for feed in samples]
    fix_sizes(net, inputs[0])
    require_same(net, Path(job["model"]), inputs, "torch's own layers do not compute what the float file computes")
    if job["method"] != "magnitude":
        set_gradients(net, inputs, squared=job["method"] == "hessian")
    most = job["share"] * multiplications(net, inputs[0])
    low, high, best = 0.0, 1 - 2.0**-STEPS, None
    for _ in range(STEPS):
        middle = (low + high) / 2
        trial = pruned(net, inputs[0], middle, job["method"], everywhere=job["scope"] == "global")
        if multiplications(trial, inputs[0]) <= most:
            high, best = middle, trial
        else:
            low = middle
    if best is None:
        raise SystemExit(f"its highest ratio leaves more than {job['share']} of the multiplications")
    tune_statistics(best, inputs)
    write(best, inputs, Path(job["output"]))


def torch_layers(path: Path) -> fx.GraphModule:
    """Re-import an ONNX file, with torch's own layers where torch-pruning prunes; outputs are a tensor or a tuple."""
    net = reimport(graphs.load(path))
    for node in net.graph.nodes:
        call = _call(net, node)
        if call is not None and call.op in LAYERS:
            constants = [None if each is None else getattr(net, str(each.target)).detach() for each in node.args[1:]]
            setattr(net, str(node.target), LAYERS[call.op](call, *constants))
            node.args = node.args[:1]
        elif node.op == "output":
            values = tuple(node.args[0].values())
            node.args = (values[0] if len(values) == 1 else values,)
    net.graph.eliminate_dead_code()
    read = {node.target for node in net.graph.nodes if node.op == "get_attr"}
    for name, _ in [*net.named_parameters(recurse=False), *net.named_buffers(recurse=False)]:
        if name not in read:
            delattr(net, name)
    net.recompile()
    return net.eval()


def fix_sizes(net: fx.GraphModule, sample: tuple[torch.Tensor, ...]) -> None:
    """Give bilinear Resizes of images the constant output sizes that they have on a sample.

    torch.export does not follow the division of a dynamic batch size by itself in their scales.
    """
    sizes: dict[fx.Node, tuple[int, ...]] = {}

    class Sizes(fx.Interpreter):  # type: ignore[misc]
        def run_node(self, node: fx.Node) -> Any:
            output, call = super().run_node(node), _call(net, node)
            if call is not None and call.op == "Resize" and call.text("mode", "nearest") == "linear":
                sizes[node] = tuple(output.shape[2:])
            return output

    with torch.no_grad():
        Sizes(net).run(*sample)
    for node, size in sizes.items():
        setattr(net, str(node.target), nn.Upsample(size=size, mode="bilinear", align_corners=False))
        node.args = node.args[:1]
    net.graph.eliminate_dead_code()
    net.recompile()


def _call(net: fx.GraphModule, node: fx.Node) -> Call | None:
    """Return the ONNX node of a node of a re-imported network."""
    return getattr(net.get_submodule(str(node.target)), "call", None) if node.op == "call_module" else None


def _conv(call: Call, weight: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Conv2d:
    pads = call.integers("pads") or [0, 0, 0, 0]
    if pads[:2] != pads[2:] or call.text("auto_pad", "NOTSET") != "NOTSET" or weight.ndim != 4:
        raise SystemExit(f"'{call.name}' is not a convolution of torch: pads {pads}, weight {tuple(weight.shape)}")
    strides, dilations = (call.integers(name, [1, 1]) for name in ("strides", "dilations"))
    groups = call.integer("group", 1)
    into, out = weight.shape[1] * groups, weight.shape[0]
    layer = nn.Conv2d(into, out, weight.shape[2:], strides, pads[:2], dilations, groups, bias is not None)
    return _loaded(layer, weight=weight, bias=bias)


def _linear(call: Call, weight: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Linear:
    if call.number("alpha", 1) != 1 or call.number("beta", 1) != 1 or call.integer("transA", 0):
        raise SystemExit(f"'{call.name}' is not a fully connected layer of torch")
    weight = weight if call.integer("transB", 0) else weight.T.contiguous()
    return _loaded(nn.Linear(weight.shape[1], weight.shape[0], bias is not None), weight=weight, bias=bias)


def _norm(call: Call, scale: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> nn.BatchNorm2d:
    layer = nn.BatchNorm2d(len(scale), call.number("epsilon", 1e-5))
    return _loaded(layer, weight=scale, bias=bias, running_mean=mean, running_var=var)


def _loaded(layer: Any, **values: torch.Tensor | None) -> Any:
    layer.load_state_dict({name: value for name, value in values.items() if value is not None}, strict=False)
    return layer


LAYERS: Final[Mapping[str, Callable[..., Any]]] = {"Conv": _conv, "Gemm": _linear, "BatchNormalization": _norm}


def ignored_layers(net: fx.GraphModule) -> list[Any]:
    """Return the layers whose outputs reach a Pad or an output of the model with the same channels."""
    flow = networkx.Graph()
    makers = {}
    for node in net.graph.nodes:
        flow.add_node(node)
        layer = net.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(layer, ROOTS):
            makers[node] = layer
        if node not in makers or getattr(layer, "groups", 1) > 1:
            flow.add_edges_from((node, each) for each in node.all_input_nodes)
    ignored = []
    for part in networkx.connected_components(flow):
        calls = [_call(net, node) for node in part]
        if any(node.op == "output" for node in part) or any(call is not None and call.op == "Pad" for call in calls):
            ignored += [makers[node] for node in part if node in makers]
    return ignored


def set_gradients(net: nn.Module, inputs: list[tuple[torch.Tensor, ...]], *, squared: bool) -> None:
    """Set the gradient of each parameter: mean over samples of the gradient of the loss, or of its square.

    The loss is the cross-entropy of the class that the network predicts. torch-pruning 1.6.1 has `accumulate_grad` for
    squares, which keeps those of the last sample alone.
    """
    parameters = list(net.parameters())
    sums = [torch.zeros_like(each) for each in parameters]
    for sample in inputs:
        logits = net(*sample)
        loss = nn.functional.cross_entropy(logits, logits.argmax(1))
        for total, gradient in zip(sums, torch.autograd.grad(loss, parameters), strict=True):
            total += gradient.square() if squared else gradient
    for parameter, total in zip(parameters, sums, strict=True):
        parameter.grad = total / len(inputs)


def pruned(
    net: fx.GraphModule, sample: tuple[torch.Tensor, ...], ratio: float, method: str, *, everywhere: bool
) -> fx.GraphModule:
    """Return a copy without a share of the channels."""
    import torch_pruning as tp

    importances = {
        "magnitude": tp.importance.GroupMagnitudeImportance,
        "taylor": tp.importance.GroupTaylorImportance,
        "hessian": tp.importance.GroupHessianImportance,
    }
    trial = copy.deepcopy(net)
    for mine, source in zip(trial.parameters(), net.parameters(), strict=True):
        mine.grad = None if source.grad is None else source.grad.clone()
    pruner = tp.pruner.BasePruner(
        trial,
        list(sample),
        importance=importances[method](),
        global_pruning=everywhere,
        pruning_ratio=ratio,
        max_pruning_ratio=MOST,
        ignored_layers=ignored_layers(trial),
    )
    pruner.step()
    return trial


def multiplications(net: nn.Module, sample: tuple[torch.Tensor, ...]) -> int:
    """Return the multiplications of a sample in convolutions and fully connected layers."""
    counts: list[int] = []

    def count(layer: Any, _: Any, output: torch.Tensor) -> None:
        counts.append(layer.weight.numel() * output[0, 0].numel())

    hooks = [layer.register_forward_hook(count) for layer in net.modules() if isinstance(layer, ROOTS)]
    with torch.no_grad():
        net(*sample)
    for hook in hooks:
        hook.remove()
    return sum(counts)


def tune_statistics(net: nn.Module, inputs: list[tuple[torch.Tensor, ...]]) -> None:
    """Measure mean and variance of each batch norm again: averages over batches."""
    norms = [layer for layer in net.modules() if isinstance(layer, nn.BatchNorm2d)]
    for layer in norms:
        layer.reset_running_stats()
        layer.momentum = None
        layer.train()
    if norms:
        with torch.no_grad():
            for at in range(0, len(inputs), BATCH):
                net(*(torch.cat(parts) for parts in zip(*inputs[at : at + BATCH], strict=True)))
    net.eval()


def write(net: fx.GraphModule, inputs: list[tuple[torch.Tensor, ...]], path: Path) -> None:
    """Export the network with a dynamic batch axis, and compare the file with it."""
    pair = _pair(inputs)
    torch.onnx.export(
        net,
        pair,
        str(path),
        input_names=list(net.meta[META]["inputs"].values()),
        output_names=net.meta[META]["outputs"],
        dynamic_shapes=tuple({0: torch.export.Dim.DYNAMIC} for _ in pair),
        dynamo=True,
        external_data=False,
    )
    require_same(net, path, inputs, "the file that torch.onnx wrote does not compute what the torch module computes")


def require_same(net: fx.GraphModule, path: Path, inputs: list[tuple[torch.Tensor, ...]], otherwise: str) -> None:
    """Compare the network and a file on two samples."""
    import onnxruntime as ort

    pair = _pair(inputs)
    with torch.no_grad():
        wanted = net(*pair)
    runner = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = net.meta[META]["inputs"].values()
    found = runner.run(None, {name: value.numpy() for name, value in zip(names, pair, strict=True)})
    for want, got in zip(wanted if isinstance(wanted, tuple) else (wanted,), found, strict=True):
        if np.abs(want.numpy() - got).max() > SAME * np.abs(got).max():
            raise SystemExit(otherwise)


def _pair(inputs: list[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    """Return a batch of two samples: torch.export takes an axis of one for constant."""
    return tuple(torch.cat(parts) for parts in zip(*inputs[:2], strict=True))


if __name__ == "__main__":
    raise SystemExit(measured.main(prune, "torch_pruning", batch=1))
