"""Fast forward for small resident models in draft steps, with fused weights and CUDA graphs."""
