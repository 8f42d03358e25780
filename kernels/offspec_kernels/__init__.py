"""Kernels for tree-shaped decoding. Each has a reference in torch, the truth it is tested against."""
