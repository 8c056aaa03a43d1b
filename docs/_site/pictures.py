"""Pictures of the tutorial: `python -m docs._site.pictures` writes them into docs/tutorial/. Needs Chromium.

The report pages are those of the tutorial's commands, as a reader sees them.
"""

from __future__ import annotations

import base64
import io
import tempfile
from pathlib import Path
from typing import Any, Final

from PIL import Image

import sbonnx
from sbonnx.assets import digits
from tests.present.browser import Browser, browser, found

FOLDER: Final = Path(__file__).resolve().parents[1] / "tutorial"
WIDTH: Final = 1000
COLOURS: Final = 64
"""Colours of the palette, which keeps the files small."""

PARTS: Final = {
    "page_verdict": ("header", ".tiles"),
    "page_causes": (".begins", ".bars"),
    "page_histograms": (".histograms", ".histograms"),
    "page_graph": (".graph", ".graph"),
}
"""Pictures by name: selectors of the first and of the last element that they show."""


def picture(page: Browser, first: str, last: str) -> bytes:
    """Return a part of the open page as PNG."""
    box = "(s => {{ const b = document.querySelector(s).getBoundingClientRect(); return [b.top, b.bottom]; }})({!r})"
    top, bottom = page.run(box.format(first))[0], page.run(box.format(last))[1]
    clip = {"x": 0, "y": max(top - 12, 0), "width": WIDTH, "height": bottom - top + 24, "scale": 1}
    shot: dict[str, Any] = page.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
    image = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB").quantize(COLOURS)
    out = io.BytesIO()
    image.save(out, "PNG", optimize=True)
    return out.getvalue()


def main() -> None:
    """Quantize the model of the tutorial with 3 bits, and write the parts of its page."""
    program = found()
    if program is None:
        raise SystemExit("no browser was found: install chromium")
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, browser(program) as opened:
        report = sbonnx.quantize(
            digits().model,
            digits().calib,
            split=32,
            output=Path(folder, "digits_w3a3.onnx"),
            backend="virtual",
            bits="w3a3",
            details=True,
        )
        page = Path(folder, "page.html")
        page.write_text(report.to_html().replace(folder + "/", "").replace(f"{digits().model.parent}/", ""), "utf-8")
        opened.open(page, width=WIDTH)
        for name, (first, last) in PARTS.items():
            (FOLDER / f"{name}.png").write_bytes(picture(opened, first, last))


if __name__ == "__main__":
    main()
