"""A backend for int8 microcontroller kernels."""
