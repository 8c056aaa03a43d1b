"""Linear operators (Conv, ConvTranspose, Gemm, MatMul): layout of their weights, and im2col of their inputs."""
