"""GPTQ in torch on one Llama decoder: `python -m benchmarks.peers.torch_gptq_llama JOB`.

A plain reference of the paper, not a package: GPTQModel and others need CUDA or compile kernels at installation. JOB is
that of `auto_round_llama`, whose environment, module and file form it uses; method is "gptq" or "gptq actorder".

Source: Frantar et al. 2022, "GPTQ", algorithm 1, with what the authors' program sets: damping of 0.01, panels of 128
columns, min-max scales of a block of columns when it is reached, layers of a transformer block in the order of their
execution, inputs from the quantized network.
"""

from __future__ import annotations

from typing import Any, Final

from benchmarks.peers import auto_round_llama, measured

DAMPING: Final = 0.01
PANEL: Final = 128

ORDER: Final = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""Layers of a transformer block that read the same input, in the order of their execution."""


def quantize(job: measured.Job, samples: measured.Feeds) -> None:
    """Round the weights of all blocks, and save the graph with their codes and external data."""
    auto_round_llama.convert(job, samples, fit)


def fit(module: Any, tokenizer: str, ids: list[Any], job: measured.Job) -> None:
    """Round the layers of a LlamaForCausalLM in place; they get `scale` and `zp`."""
    import torch

    del tokenizer
    torch.set_num_threads(1)
    windows = torch.cat([torch.from_numpy(each).long() for each in ids])
    reorders = "actorder" in job["method"].split()
    with torch.no_grad():
        hidden = module.model.embed_tokens(windows)
        positions = torch.arange(windows.shape[1])[None]
        rotary = module.model.rotary_emb(hidden, positions)
        for block in module.model.layers:

            def run(block: Any = block, hidden: Any = hidden) -> Any:
                parts = [
                    block(part, attention_mask=None, position_ids=positions, position_embeddings=rotary)
                    for part in hidden.split(8)
                ]
                return torch.cat([part[0] if isinstance(part, tuple) else part for part in parts])

            for names in ORDER:
                layers = [block.get_submodule(name) for name in names]
                moments = hessian(layers[0], run)
                for layer in layers:
                    round_layer(layer, moments.clone(), job["block"], 2 ** job["bits"] - 1, reorders)
            hidden = run()


def hessian(layer: Any, run: Any) -> Any:
    """Return the mean of 2 x x' over the inputs of a layer, (K, K), in one run of its block."""
    import torch

    total, rows = torch.zeros(layer.in_features, layer.in_features), 0

    def add(_: Any, inputs: tuple[Any, ...]) -> None:
        nonlocal rows
        x = inputs[0].reshape(-1, layer.in_features)
        total.addmm_(x.T, x, alpha=2.0)
        rows += len(x)

    hook = layer.register_forward_pre_hook(add)
    run()
    hook.remove()
    return total / rows


def round_layer(layer: Any, moments: Any, size: int, largest: int, reorders: bool) -> None:
    """Round the weight of a layer, (N, K), in place, with scales of `size` columns; algorithm 1 of the paper."""
    import torch

    weight = layer.weight.detach().clone()
    rows, columns = weight.shape
    dead = moments.diagonal() == 0
    moments.diagonal()[dead] = 1
    weight[:, dead] = 0
    scales, zeros = torch.empty(rows, columns // size), torch.empty(rows, columns // size)
    order = torch.argsort(moments.diagonal(), descending=True) if reorders else torch.arange(columns)
    if reorders:  # scales of the blocks of the file, found before
        for group in range(columns // size):
            scales[:, group], zeros[:, group] = grid(weight[:, group * size : (group + 1) * size], largest)
    weight, moments = weight[:, order], moments[order][:, order]
    moments.diagonal().add_(DAMPING * moments.diagonal().mean())
    inverse = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(moments)), upper=True)
    rounded = torch.empty_like(weight)
    for start in range(0, columns, PANEL):
        stop = min(start + PANEL, columns)
        panel, errors = weight[:, start:stop].clone(), torch.empty(rows, stop - start)
        own = inverse[start:stop, start:stop]
        for at in range(stop - start):
            place = int(order[start + at])
            group = place // size
            if not reorders and place % size == 0:
                # within a panel the columns of the block are those that were updated so far
                reach = panel[:, at : at + size]
                scales[:, group], zeros[:, group] = grid(reach, largest)
            scale, zero = scales[:, group], zeros[:, group]
            values = (torch.clamp(torch.round(panel[:, at] / scale + zero), 0, largest) - zero) * scale
            errors[:, at] = (panel[:, at] - values) / own[at, at]
            panel[:, at:] -= errors[:, at, None] * own[at, at:][None]
            rounded[:, start + at] = values
        weight[:, stop:] -= errors @ inverse[start:stop, stop:]
    layer.weight.data[:, order] = rounded
    layer.scale, layer.zp = scales, zeros


def grid(values: Any, largest: int) -> tuple[Any, Any]:
    """Return asymmetric min-max scales and zero points of rows."""
    import torch

    low, high = values.amin(dim=1).clamp(max=0), values.amax(dim=1).clamp(min=0)
    scale = ((high - low) / largest).clamp(min=1e-10)
    return scale, torch.clamp(torch.round(-low / scale), 0, largest)


if __name__ == "__main__":
    raise SystemExit(measured.main(quantize, "transformers"))
