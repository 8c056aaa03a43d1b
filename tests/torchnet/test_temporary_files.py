"""What torch leaves in the temporary folder."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from sbonnx.system.isolation import python_command

pytest.importorskip("torch", reason="torch is not installed")


def optimize(use: bool) -> None:
    """Create an optimizer, as training does; `use`: and a file in torch's folder of compiled code."""
    from sbonnx.torchnet import torch_module

    torch = torch_module()
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert folder.is_dir()
    if use:
        (folder / "kernel").touch()


@pytest.mark.parametrize("use", [False, True])
def test_the_folder_of_compiled_code_is_removed_if_it_is_empty(use: bool, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TORCHINDUCTOR_CACHE_DIR"}
    command = python_command(__name__, optimize.__name__, use)
    subprocess.run(command, env={**environment, "TMPDIR": str(tmp_path)}, check=True, timeout=600)
    assert [path.name for path in tmp_path.glob("*/*")] == (["kernel"] if use else [])
    assert use or not list(tmp_path.iterdir())
