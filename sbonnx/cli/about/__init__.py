"""Verbs about sbonnx itself: completion, environment, explanations."""
