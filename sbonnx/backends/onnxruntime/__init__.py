"""onnxruntime on a CPU: what its integer kernels take, what they cost, and how a graph is made legal for them."""
