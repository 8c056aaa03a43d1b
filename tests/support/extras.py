"""Marks of tests that need an optional package."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

needs_openvino = pytest.mark.skipif(find_spec("openvino") is None, reason="OpenVINO is not installed")
