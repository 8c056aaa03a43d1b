"""Fixtures: a browser (skip without one), and the report of a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sbonnx.assets import digits
from tests.present import browser as browsers


@pytest.fixture(scope="session")
def chromium() -> Iterator[browsers.Browser]:
    """An open browser."""
    program = browsers.found()
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(browsers.NAMES)} is on PATH")
    with browsers.browser(program) as opened:
        yield opened


@pytest.fixture(scope="session")
def digits_report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of the bundled model."""
    from sbonnx.api.create import quantize

    where = tmp_path_factory.mktemp("digits")
    return quantize(digits().model, digits().calib, output=where / "digits.int8.onnx").to_dict()
