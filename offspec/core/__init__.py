"""Shared basics of all packages: settings, errors, events, tracing, files and process memory.

Inputs and outputs are plain values. Nothing here uses tensors or imports torch.
"""
