"""A forward for small resident models with fused weights and CUDA graphs, for draft steps."""
