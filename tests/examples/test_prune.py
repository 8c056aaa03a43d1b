"""The example of pruning on the bundled network: smaller files that classify as well as the float one."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import onnx
import pytest

from sbonnx.assets import digits

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "prune" / "prune_and_quantize.py"


@pytest.mark.slow
def test_half_of_the_multiplications(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("prune_and_quantize", SCRIPT)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    assert example.main([str(tmp_path), "--macs", "0.5"]) == 0
    shown = capsys.readouterr().out
    before = digits().model.stat().st_size
    for name, share in (("pruned.onnx", 0.6), ("int8.onnx", 0.5), ("pruned_int8.onnx", 0.35)):
        path = tmp_path / name
        onnx.checker.check_model(str(path), full_check=True)
        assert path.stat().st_size < share * before
        assert example.accuracy(path) > 0.97
        assert name in shown
