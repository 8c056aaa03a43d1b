"""Pretrained models out of packages, quantized with the defaults."""
