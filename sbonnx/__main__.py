"""Entry point of ``python -m sbonnx``, equal to the command ``sbonnx``."""

from __future__ import annotations

import sys

from sbonnx.cli import main

if __name__ == "__main__":
    sys.exit(main())
