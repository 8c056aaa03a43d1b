"""The rules of onnxruntime-web: each finds the mistake that was seeded for it; Node names the kernels that run."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import onnx
import pytest
from onnx import helper

from sbonnx.errors import ModelError
from sbonnx.linting import lint
from sbonnx.linting.web_rules import NEWEST_IR, NEWEST_OPSET, WEB_RULES
from sbonnx.runtimes.wasm import WASM
from tests.lint.test_ort import SEEDED as SEEDED_ORT
from tests.lint.test_ort import conv, in_blocks
from tests.support.qdq_models import Net

Made = Callable[[], onnx.ModelProto]

SHARED: Final = tuple(rule.id for rule in WEB_RULES if rule.id.startswith("O"))

IN_FLOAT: Final = ("O10", "O14", "O16", "O17", "O18", "O19", "O21", "O22", "O23", "O24")
"""Rules whose mistake leaves ops in float, or pairs around them."""

PROFILE: Final = """
import fs from 'node:fs'; import path from 'node:path'; import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';
const [modules, ...files] = process.argv.slice(2);
const find = createRequire(path.resolve(modules, '..', 'x.js'));
const ort = (await import(pathToFileURL(find.resolve('onnxruntime-web')).href)).default;
ort.env.wasm.numThreads = 1; ort.env.logLevel = 'fatal';
for (const file of files) {
  const options = { executionProviders: ['wasm'], enableProfiling: true };
  const session = await ort.InferenceSession.create(new Uint8Array(fs.readFileSync(file)), options);
  const feed = {};
  for (const { name, shape, type } of session.inputMetadata) {
    const dims = shape.map((dim) => (typeof dim === 'number' ? dim : 1));
    const Values = type === 'float16' ? Uint16Array : Float32Array;
    feed[name] = new ort.Tensor(type, new Values(dims.reduce((a, b) => a * b, 1)), dims);
  }
  await session.run(feed); session.endProfiling(); console.log('END ' + file); await session.release();
}
"""


def half() -> onnx.ModelProto:
    net = Net(half=True)
    return net.done(net.op("Relu", "x"))


def single(op: str = "Relu", opset: int = 21) -> onnx.ModelProto:
    net = Net()
    model = net.done(net.op(op, "x"))
    model.opset_import[0].version = opset
    return model


def four_bits(kind: int) -> onnx.ModelProto:
    """Codes of four bits behind a DequantizeLinear."""
    net = Net()
    net.stored.append(helper.make_tensor("codes", kind, [4, 1, 1], [1, 0, 1, 1]))
    return net.done(net.op("Add", "x", net.op("DequantizeLinear", "codes", net.keep(0.5))))


SEEDED: dict[str, tuple[Made, Made]] = {
    "W01": (lambda: single(opset=NEWEST_OPSET + 1), single),
    "W02": (lambda: four_bits(onnx.TensorProto.FLOAT4E2M1), lambda: four_bits(onnx.TensorProto.INT4)),
    "W03": (half, single),
    "W04": (lambda: single("Softsign"), single),
    "W05": (lambda: in_blocks(4), lambda: in_blocks(1)),
}
"""A model with the mistake, and one without, by rule."""


def found(model: Any) -> set[str]:
    return {row.rule for row in lint(model, "web")}


@pytest.mark.parametrize("rule", SEEDED)
def test_a_seeded_mistake_is_found_by_its_rule_alone(rule: str) -> None:
    bad, good = SEEDED[rule]
    assert found(bad()) == {rule}
    assert found(good()) == set()


@pytest.mark.parametrize("rule", SHARED)
def test_shared_rules_find_the_mistake(rule: str) -> None:
    bad, good = SEEDED_ORT[rule]
    assert rule in found(bad())
    assert rule not in found(good())


def test_a_newer_ir_version_is_found() -> None:
    model = single()
    model.ir_version = NEWEST_IR + 1
    assert found(model) == {"W01"}


def test_ops_outside_of_webgpu_are_counted_by_type() -> None:
    rows = [row for row in lint(conv(), "web") if row.rule == "W04"]
    assert [row.why.split(":")[0] for row in rows] == ["2 QuantizeLinear"]


def test_external_data_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(conv(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    (row,) = [row for row in lint(path, "web") if row.rule == "W06"]
    assert "weights.bin" in row.why
    onnx.save(conv(), path)
    assert "W06" not in found(path)


@pytest.mark.slow
def test_webassembly_refuses_what_the_rules_call_an_error() -> None:
    """Newer versions and FP4 codes are refused, and the newest allowed ones are not."""
    if reason := WASM.absent():
        pytest.skip(reason)
    old = single(opset=NEWEST_OPSET)
    old.ir_version = NEWEST_IR
    new = single()
    new.ir_version = NEWEST_IR + 1
    WASM.open(old.SerializeToString(), 1)
    for model in (SEEDED["W01"][0](), SEEDED["W02"][0](), new):
        with pytest.raises(ModelError, match="refuses the model"):
            WASM.open(model.SerializeToString(), 1)


@pytest.mark.slow
def test_kernels_in_webassembly_are_those_that_the_rules_say(tmp_path: Path) -> None:
    """With a mistake, the profile has more float ops and nodes of pairs than without."""
    modules = os.environ.get("SBONNX_NODE_MODULES", "node_modules")
    if reason := WASM.absent():
        pytest.skip(reason)
    if not Path(modules).is_dir():
        pytest.skip("needs onnxruntime-web in node_modules here, or in the folder of SBONNX_NODE_MODULES")
    script = tmp_path / "profile.mjs"
    script.write_text(PROFILE)
    files = []
    for rule in IN_FLOAT:
        for name, make in zip(("bad", "good"), SEEDED_ORT[rule], strict=True):
            files.append(tmp_path / f"{rule}.{name}.onnx")
            onnx.save(make(), files[-1])
    command = ["node", str(script), modules, *map(str, files)]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    kernels: dict[str, Counter[str]] = {}
    current: Counter[str] = Counter()
    for line in printed.splitlines():
        if line.startswith("END "):
            kernels[Path(line).stem], current = current, Counter()
        elif re.search(r'"name" :".*_kernel_time"', line):
            row = json.loads(line.rstrip(","))["args"]
            current[row["op_name"]] += 1
    shares = {name: _share_of_pairs(ops) for name, ops in kernels.items()}
    assert all(shares[f"{rule}.bad"] > shares[f"{rule}.good"] for rule in IN_FLOAT), kernels


def _share_of_pairs(kernels: Counter[str]) -> float:
    """Return the share of QuantizeLinear and DequantizeLinear among the kernels."""
    return (kernels["QuantizeLinear"] + kernels["DequantizeLinear"]) / kernels.total()
