"""Generation with onnxruntime-genai, if it is installed: the last check of a folder in its form."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from typing import Any, Final

import numpy as np

from sbonnx.llm.layout import Decoder
from sbonnx.report.decoder import GenAIRun
from sbonnx.spec import Array
from sbonnx.system.isolation import python_command

PACKAGE: Final = "onnxruntime_genai"
GENERATED: Final = 16
"""Tokens to generate."""

PROMPT: Final = 16
"""Tokens of the prompt, at most."""

SECONDS: Final = 600


def generate_with_genai(decoder: Decoder, ids: Array) -> GenAIRun:
    """Open the folder with onnxruntime-genai and generate 16 tokens, in a separate process.

    Args:
        ids: token ids of a window; the first 16 are the prompt.
    """
    if importlib.util.find_spec(PACKAGE) is None:
        return GenAIRun(False, error="onnxruntime-genai is not installed: the folder was not opened with it")
    prompt = [int(token) for token in ids[:PROMPT]]
    adapter = None if decoder.adapter is None else str(decoder.adapter)
    command = python_command("sbonnx.llm.generation", "print_tokens", str(decoder.folder), prompt, GENERATED, adapter)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return GenAIRun(True, error=f"onnxruntime-genai did not finish in {SECONDS} s")
    if done.returncode or not done.stdout.strip():
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        return GenAIRun(True, error=lines[-1][:300])
    return GenAIRun(True, tuple(json.loads(done.stdout.splitlines()[-1])))


def print_tokens(folder: str, prompt: list[int], count: int, adapter: str | None = None) -> None:
    """Print the tokens that onnxruntime-genai generates greedily after a prompt, as JSON.

    Args:
        adapter: file of an adapter, which is active.
    """
    genai: Any = importlib.import_module(PACKAGE)
    model = genai.Model(folder)
    parameters = genai.GeneratorParams(model)
    parameters.set_search_options(max_length=len(prompt) + count, do_sample=False)
    generator = genai.Generator(model, parameters)
    if adapter is not None:
        adapters = genai.Adapters(model)
        adapters.load(adapter, "adapter")
        generator.set_active_adapter(adapters, "adapter")
    generator.append_tokens(np.asarray([prompt], np.int32))
    tokens: list[int] = []
    while len(tokens) < count and not generator.is_done():
        generator.generate_next_token()
        tokens.append(int(generator.get_next_tokens()[0]))
    print(json.dumps(tokens), flush=True)
