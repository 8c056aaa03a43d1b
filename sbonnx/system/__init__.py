"""The machine that sbonnx runs on: CPU, files, terminal, child interpreters, onnxruntime and compiled modules."""
