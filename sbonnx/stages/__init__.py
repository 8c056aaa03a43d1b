"""Stages of the pipeline, in the order of `sbonnx.pipeline.STAGES`: prepare, measure, write, verify.

Each is one function ``(state, options) -> state``.
"""
