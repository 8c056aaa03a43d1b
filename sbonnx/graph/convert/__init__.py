"""Models as they are read: validation, opset conversion, functions, sparse tensors."""
