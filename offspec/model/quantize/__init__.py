"""Quantization of weights, its calibration, and packs (quantized checkpoints) on disk."""
