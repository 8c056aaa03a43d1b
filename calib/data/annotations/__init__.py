"""Annotated images: COCO JSON, YOLO text files, Pascal VOC XML and CSV tables, recognized by their structure."""

from __future__ import annotations

from sbonnx.calib.data.annotations.find import annotated_at

__all__ = ["annotated_at"]
