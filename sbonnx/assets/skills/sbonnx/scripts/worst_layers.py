"""List the layers with the largest error of `sbonnx profile --json`, and options that leave them float."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def main(arguments: list[str]) -> int:
    """Print the worst layers and the options; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("profile", type=Path, help="output of sbonnx profile FLOAT QUANTIZED --data DATA --json")
    parser.add_argument("--count", type=int, default=3, help="number of layers")
    given = parser.parse_args(arguments)
    output = json.loads(given.profile.read_text(encoding="utf-8"))
    measured = [row for row in output["layers"] if isinstance(row["alone"], (int, float))]
    worst = sorted(measured, key=lambda row: row["alone"], reverse=not output["higher_is_better"])[: given.count]
    for row in worst:
        parts = {part: row[part] for part in ("weights", "activations") if isinstance(row[part], (int, float))}
        cause = ", ".join(f"{part} {value:.1f}" for part, value in parts.items())
        print(f"{row['node']} ({row['op']}): {row['alone']:.1f} {output['unit']} alone; by {cause}")
    print("options:", " ".join(f"--exclude {row['node']}" for row in worst))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
