"""Weights in fewer bits: rounding, what it is calibrated with, and packs on disk."""
