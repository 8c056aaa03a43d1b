"""onnxruntime on CPU: rules of its integer kernels, their costs, and the rewrites that make a graph legal for them."""
