"""The Triton backend: fused kernels for GPUs."""
