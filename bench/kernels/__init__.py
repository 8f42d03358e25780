"""Kernel benchmarks: speed relative to the device's limits, and accuracy."""
