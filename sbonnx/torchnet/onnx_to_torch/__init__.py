"""ONNX graph to `torch.fx.GraphModule`."""
